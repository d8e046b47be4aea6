"""Where two sides part: the first operator whose output differs.

In: a Program whose numbers differ from the reference. Out: the first op, in execution order, whose output, put together
from its parts and with the addends summed, differs from the same op on one device; its tensor and source line. The
yardstick is the Program of the plan that does nothing, on one device, drawing from the same stream. If every forward
value agrees, the fault lies in backward: the first parameter, in reverse order of use, whose gradient differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from weft.ir.graph import Graph
from weft.ir.layout import Layout
from weft.ir.program import Chunks, Compute, Program, Recompute, Step
from weft.lower import lower
from weft.plan.plan import Plan
from weft.runtime.transfers import put
from weft.verify.compare import FirstDifference, Sample, apart_in, difference, scale_of
from weft.verify.model_file import Subject
from weft.verify.parallel import Record, record

OUTSIDE = (
    "forward depends on something outside its inputs and parameters (a global, the clock, a dtype): "
    "make it an input or a buffer"
)


def locate(
    program: Program, subject: Subject, ours: Sample, reference: Sample, *, seed: int, tolerance: float
) -> FirstDifference | None:
    """The first op whose output differs, else the first gradient, else the first weight."""
    return (
        _first_op(program, subject, seed=seed, tolerance=tolerance)
        or _first_loss(program.graph, ours, reference, tolerance)
        or _first_gradient(program.graph, ours, reference, tolerance)
        or _first_weight(ours, reference, tolerance)
    )


def locate_in_code(graph: Graph, ours: Sample, reference: Sample, tolerance: float) -> FirstDifference | None:
    """The same for generated code, whose operators cannot be looked at one by one."""
    gradient = _first_gradient(graph, ours, reference, tolerance)
    apart = difference(ours.losses[0], reference.losses[0])
    if apart > tolerance:
        where = "" if gradient is None else f"; the last parameter used whose gradient differs is {gradient.tensor}"
        return FirstDifference(
            "", str(graph.loss), "", apart, f"the loss of the first step differs: the fault is in forward{where}"
        )
    return gradient or _first_weight(ours, reference, tolerance)


def _first_op(program: Program, subject: Subject, *, seed: int, tolerance: float) -> FirstDifference | None:
    graph = program.graph
    found = record(program, subject, seed=seed)
    expected = record(lower(Plan(graph, devices=1)), subject, seed=seed)[0]
    computes = {step.op: step for step in walk(program.steps) if isinstance(step, Compute)}
    for op in graph.ops:
        if op.name not in computes:
            continue
        for output, (tensor, value) in enumerate(zip(op.outputs, computes[op.name].outputs, strict=True)):
            right = expected[op.name, output, 0]
            for whole in gather(program.values[value].layout, found, op.name, output):
                apart = difference(whole, right)
                if apart > tolerance:
                    return FirstDifference(op.name, tensor, str(op.source) if op.source.line else "", apart)
    return None


def walk(steps: Sequence[Step]) -> Iterator[Step]:
    """All steps, those inside chunks and recomputed regions too."""
    for step in steps:
        yield step
        if isinstance(step, Chunks | Recompute):
            yield from walk(step.body)


def gather(layout: Layout, records: Sequence[Record], op: str, output: int) -> Iterator[torch.Tensor]:
    """The whole tensor, once for every copy of it that the devices hold."""
    copies = [i for i, role in enumerate(layout.roles) if role.kind == "copy"]
    for at in itertools.product(*(range(layout.grid.axes[i].size) for i in copies)):
        parts = [part for part in layout.parts() if tuple(part.cell[i] for i in copies) == at]
        tensors = [records[part.device][op, output, part.slot] for part in parts]
        whole = torch.zeros(layout.shape, dtype=tensors[0].dtype)
        for part, tensor in zip(parts, tensors, strict=True):
            if whole.dtype == torch.bool:
                put(whole, part.ranges, tensor)
            else:
                put(whole, part.ranges, tensor, add=True)
        yield whole


def _first_loss(graph: Graph, ours: Sample, reference: Sample, tolerance: float) -> FirstDifference | None:
    apart = difference(ours.losses[0], reference.losses[0])
    if apart <= tolerance:
        return None
    op = graph.producers.get(str(graph.loss))
    return FirstDifference(
        op="" if op is None else op.name,
        tensor=str(graph.loss),
        source="" if op is None else str(op.source),
        difference=apart,
        note="every operator agrees with the captured graph on one device: the graph differs from the eager model",
        remedy=OUTSIDE,
    )


def _first_gradient(graph: Graph, ours: Sample, reference: Sample, tolerance: float) -> FirstDifference | None:
    a, b = ours.gradients[0], reference.gradients[0]
    scale = scale_of(b)
    for name in reversed(_in_order_of_use(graph)):
        apart = apart_in(name, a, b, scale)
        if apart > tolerance:
            return FirstDifference("", name, "", apart, "the loss agrees: the fault is in backward")
    return None


def _in_order_of_use(graph: Graph) -> list[str]:
    """Every name of every parameter, in the order in which ops first use them; unused ones first."""
    position = {name: i for i, op in reversed(list(enumerate(graph.ops))) for name in op.inputs}
    ordered = sorted(graph.parameters, key=lambda parameter: position.get(parameter.tensor, -1))
    return [name for parameter in ordered for name in parameter.names]


def _first_weight(ours: Sample, reference: Sample, tolerance: float) -> FirstDifference | None:
    scale = scale_of(reference.weights)
    for name in reference.weights:
        apart = apart_in(name, ours.weights, reference.weights, scale)
        if apart > tolerance:
            return FirstDifference("", name, "", apart, "the first step's gradients agree: the fault is in the update")
    return None

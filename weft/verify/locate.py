"""Where two sides part: the first operator whose output differs.

In: Programs whose numbers differ from the reference. Out: the first op, in execution order, whose output, put together
from its parts and with the addends summed, differs from the same op on one device; its tensor and source line. Both are
told by generated code that traces its ops: that of the plan, and that of the plan that does nothing, drawing from the
same stream. If every forward value agrees, the fault lies in backward: the first parameter, in reverse order of use,
whose gradient differs. If the code that traces gives the reference's numbers, the fault is of the code that does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from weft.compile.model_file import Subject
from weft.compile.pieces import InPieces
from weft.ir.graph import Graph
from weft.ir.layout import Layout
from weft.ir.program import Compute, walk
from weft.ir.schedule import Segment
from weft.runtime.layout.execute import put
from weft.verify.compare import FirstDifference, Sample, apart_in, compare, difference, scale_of
from weft.verify.generated import Record, run_traced

OUTSIDE = (
    "forward depends on something outside its inputs and parameters (a global, the clock, a dtype): "
    "make it an input or a buffer"
)


def locate(
    pieces: InPieces,
    graph: Graph,
    subject: Subject,
    ours: Sample,
    reference: Sample,
    *,
    seed: int,
    tolerance: float,
) -> FirstDifference | None:
    """The first op whose output differs, else the first gradient, else the first weight."""
    traced, records, expected = run_traced(
        pieces.files(traced=True), [one.graph for one in pieces.sizes], graph, subject, seed=seed, reference=reference
    )
    if max(found.value for found in compare(traced, reference)) < tolerance and not traced.disagreements:
        return locate_in_code(graph, ours, reference, tolerance)
    return (
        _first_op(pieces, records, expected, tolerance)
        or _first_loss(graph, ours, reference, tolerance)
        or _first_gradient(graph, ours, reference, tolerance)
        or _first_weight(ours, reference, tolerance)
    )


def locate_in_code(graph: Graph, ours: Sample, reference: Sample, tolerance: float) -> FirstDifference | None:
    """The same for a program whose operators cannot be looked at one by one."""
    gradient = _first_gradient(graph, ours, reference, tolerance)
    apart = difference(ours.losses[0], reference.losses[0])
    if apart > tolerance:
        where = "" if gradient is None else f"; the last parameter used whose gradient differs is {gradient.tensor}"
        return FirstDifference(
            "", str(graph.loss), "", apart, f"the loss of the first step differs: the fault is in forward{where}"
        )
    return gradient or _first_weight(ours, reference, tolerance)


def _first_op(
    pieces: InPieces, records: Sequence[Record], expected: Record, tolerance: float
) -> FirstDifference | None:
    for micro, size in enumerate(pieces.size_of):
        computes = [
            (part, {step.op: step for step in walk(part.program.steps) if isinstance(step, Compute)})
            for part in pieces.sizes[size].parts
        ]
        for op in pieces.sizes[size].graph.ops:
            for part, steps in computes:
                for output, value in enumerate(steps[op.name].outputs if op.name in steps else ()):
                    right = expected["", micro, op.name, output, 0]
                    layout, segment = part.program.values[value].layout, part.piece.segment
                    for whole in gather(layout, segment, records, (micro, op.name, output)):
                        apart = difference(whole, right)
                        if apart > tolerance:
                            source = str(op.source) if op.source.line else ""
                            return FirstDifference(op.name, op.outputs[output], source, apart)
    return None


def gather(layout: Layout, segment: Segment, records: Sequence[Record], key: tuple[int, str, int]) -> Iterator[Tensor]:
    """The whole tensor, once for every copy of it that the devices hold.

    Args:
        segment: of the piece that made it.
        key: micro-batch, op and output.
    """
    copies = [i for i, role in enumerate(layout.roles) if role.kind == "copy"]
    for at in itertools.product(*(range(layout.grid.axes[i].size) for i in copies)):
        parts = [part for part in layout.parts() if tuple(part.cell[i] for i in copies) == at]
        tensors = [records[segment.devices[part.device]][(segment.name, *key, part.slot)] for part in parts]
        whole = torch.zeros(layout.shape, dtype=tensors[0].dtype)
        for part, tensor in zip(parts, tensors, strict=True):
            put(whole, part.ranges, tensor, add=whole.dtype != torch.bool)
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

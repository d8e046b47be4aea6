"""Variants of a pipeline: the same model for micro-batches of another size, and for evaluation.

In: a pipeline for training, compiled, and what is asked for. Out: an InPieces beside it, proven like the first: with
the same stages, and with weights that lie where training keeps them. That of evaluation runs forwards alone, and brings
what the model returns to every device; a batch is cut only if what comes of its parts can be joined again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from weft.capture.example import split_example
from weft.compile.model_file import Subject
from weft.compile.pieces import (
    InPieces,
    as_example,
    at_other_size,
    batch_dims,
    by_size,
    check_parts,
    dims_in,
    stored_in,
    stretched,
    tensors_in,
)
from weft.compile.replan import lower_replanned
from weft.compile.subject import capture_subject
from weft.cost.links import Links
from weft.errors import PlanError
from weft.ir.graph import Graph
from weft.ir.schedule import Pipeline
from weft.lower.pipeline import Pipelined
from weft.order import make_schedule
from weft.plan.plan import Plan
from weft.runtime.program.calling import Arguments
from weft.runtime.training.flow import LOSS
from weft.runtime.training.microbatches import BatchDim, TooFewRows, rows_of, split_arguments

Make = Callable[[Graph], Plan]


def at_size(made: InPieces, subject: Subject, rows: int, make: Make) -> InPieces:
    """The same pieces for micro-batches of so many rows."""
    example = _with_rows(made.examples[0], dims_in(made.whole, made.dims), rows)
    graph = _captured(subject, example, evaluation=made.returns is not None)
    found = at_other_size(made.sizes[0], made.plan, graph, make, None)
    check_parts([found])
    return replace(made, sizes=(found,), size_of=(0,), examples=(example,))


def for_evaluation(
    trained: InPieces, subject: Subject, whole: Graph, make: Make, *, returns: Sequence[str], links: Links | None = None
) -> InPieces:
    """The pipeline of forwards of a model in evaluation mode.

    Args:
        trained: where the weights lie.
        subject: gives a whole batch as its example, whose graph is `whole`.
        returns: tensors of it that are wanted.
    """
    count = trained.plan.microbatches
    told = batch_dims(subject, whole)
    dims = dims_in(whole, told if told is None or len(told) == len(whole.inputs) else None)
    examples = _cut(split_example(subject.example), dims, count)
    graphs, size_of = by_size(examples, lambda one: _captured(subject, one, evaluation=True))
    joins = _joins(whole, [graphs[size] for size in size_of], returns) if count > 1 else None
    if joins is None and len(examples) > 1:
        examples, graphs, size_of = [split_example(subject.example)], (_only_read(whole),), (0,)
    first, *others = graphs
    plan, lowered = _as_trained(trained, first, make, links)
    sizes = (lowered, *(at_other_size(lowered, plan, graph, make, links) for graph in others))
    check_parts(sizes)
    pipeline = Pipeline(tuple(part.piece.segment for part in lowered.parts), count)
    schedule = make_schedule("inference", pipeline)
    free = pipeline.without_gradient()
    return InPieces(plan, sizes, size_of, free, schedule, tuple(examples), dims, whole, tuple(returns), joins)


def _captured(subject: Subject, batch: Arguments, *, evaluation: bool) -> Graph:
    graph = capture_subject(replace(subject, example=as_example(batch)), trains=not evaluation)
    return _only_read(graph) if evaluation else graph


def _only_read(graph: Graph) -> Graph:
    """The graph without parameters and buffers that nothing reads: a count of batches, in evaluation."""
    read = {name for op in graph.ops for name in op.inputs} | {name for name in graph.outputs if name is not None}
    held = {one.tensor for one in graph.parameters} | {one.tensor for one in graph.buffers}
    idle = held - read
    idle -= {one.tensor for one in graph.buffers if one.update is not None}
    return replace(
        graph,
        tensors={name: tensor for name, tensor in graph.tensors.items() if name not in idle},
        parameters=tuple(one for one in graph.parameters if one.tensor not in idle),
        buffers=tuple(one for one in graph.buffers if one.tensor not in idle),
    )


def _cut(arguments: Arguments, dims: Sequence[BatchDim], count: int) -> list[Arguments]:
    """In as many parts as there are rows for."""
    args, kwargs = arguments
    try:
        rows = rows_of(tensors_in(arguments), dims)
    except TooFewRows:
        rows = 1
    return split_arguments(args, dict(kwargs), dims, max(1, min(count, rows)))[0]


def _joins(whole: Graph, parts: Sequence[Graph], returns: Sequence[str]) -> tuple[int, ...] | None:
    """For each tensor the one dim in which the parts add up to the whole; None if one has no such dim."""
    found = []
    for name in returns:
        sizes = whole.tensors[name].sizes
        if name == whole.loss:
            found.append(LOSS)
            continue
        mine = [part.tensors[name].sizes for part in parts if name in part.tensors]
        if len(mine) < len(parts) or len(parts) < 2 or any(len(one) != len(sizes) for one in mine):
            return None
        differing = [dim for dim, size in enumerate(sizes) if any(one[dim] != size for one in mine)]
        if len(differing) != 1 or sum(one[differing[0]] for one in mine) != sizes[differing[0]]:
            return None
        found.append(differing[0])
    return tuple(found)


def _as_trained(trained: InPieces, graph: Graph, make: Make, links: Links | None) -> tuple[Plan, Pipelined]:
    """A plan for a graph whose weights lie where training has them."""
    homes = _homes(trained.sizes[0])
    return lower_replanned(
        trained.plan,
        graph,
        make,
        keeps=lambda pipelined: _homes(pipelined) <= homes,
        refusal=PlanError(
            "evaluation would keep its weights in other places than training does",
            remedy="evaluate a saved model under a plan without stages",
        ),
        links=links,
    )


def _homes(pipelined: Pipelined) -> frozenset[Any]:
    """What is kept from step to step, on which devices, how."""
    kept = stored_in(pipelined)
    return frozenset((name, devices, layout) for _, devices, found in kept for name, layout in found.items())


def _with_rows(arguments: Any, dims: Sequence[BatchDim], rows: int) -> Any:
    """Arguments with so many rows: only their sizes matter."""
    leaves, spec = pytree.tree_flatten(arguments)
    at = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for number, dim in zip(at, dims, strict=True):
        if dim is not None:
            leaves[number] = stretched(leaves[number], dim, rows)
    return pytree.tree_unflatten(leaves, spec)

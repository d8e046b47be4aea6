"""A plan in micro-batches, compiled: pieces, schedule, files.

In: a subject and a plan that cuts the batch. Out: an InPieces: the plan at each size that micro-batches have, proven
piece by piece, the schedule, proven too, and the files of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from weft.capture.example import split_example
from weft.codegen.pipeline import generate_pipeline
from weft.cost.links import Links
from weft.errors import PlanError
from weft.ir.graph import Graph
from weft.ir.schedule import Pipeline, Schedule
from weft.lower.check import check
from weft.lower.pipeline import Pipelined, lower_pieces
from weft.order import check_schedule, make_schedule
from weft.plan.plan import Plan
from weft.runtime.microbatches import BatchDim, TooFewRows, split_arguments
from weft.verify.model_file import Subject


@dataclass(frozen=True)
class InPieces:
    """A pipeline, ready to run.

    Args:
        examples: the micro-batches of the example, as arguments.
        size_of: which of `sizes` each has.
        dims: the batch dim of each tensor of the example.
    """

    plan: Plan
    sizes: tuple[Pipelined, ...]
    size_of: tuple[int, ...]
    pipeline: Pipeline
    schedule: Schedule
    examples: tuple[Any, ...]
    dims: tuple[BatchDim, ...] | None

    def files(self, about: dict[str, Any] | None = None) -> dict[str, bytes]:
        return generate_pipeline(self.sizes, self.schedule, about={"size_of": list(self.size_of), **(about or {})})


def is_in_pieces(plan: Plan) -> bool:
    """True if a plan runs a step in micro-batches, or stage by stage."""
    return plan.microbatches > 1 or bool(plan.stages)


def compile_pieces(
    subject: Subject,
    plan: Plan,
    capture: Callable[[Subject], Graph],
    make: Callable[[Graph], Plan],
    *,
    links: Links | None = None,
) -> InPieces:
    """Compile a plan in micro-batches.

    Args:
        plan: made for the whole batch; tells how many micro-batches there are.
        capture: gives the graph of a subject.
        make: plans the graph of a micro-batch.
    """
    dims = batch_dims(subject, plan.graph)
    args, kwargs = split_example(subject.example)
    try:
        examples = split_arguments(args, dict(kwargs), dims, plan.microbatches)
    except TooFewRows as error:
        raise PlanError(
            str(error), place=f"microbatches={plan.microbatches}", remedy="use fewer micro-batches, or a larger batch"
        ) from None
    graphs: dict[str, Graph] = {}
    keys = []
    for one in examples:
        key = str([tuple(tensor.shape) for tensor in _tensors(one)])
        keys.append(key)
        if key not in graphs:
            graphs[key] = capture(replace(subject, example=_as_example(one)))
    first, *others = graphs.values()
    made = make(first)
    plans = [made, *(Plan(graph, made.devices, made.lines) for graph in others)]
    sizes = tuple(lower_pieces(one, links=links) for one in plans)
    for part in (part for one in sizes for part in one.parts):
        check(part.program)
    pipeline = Pipeline(tuple(part.piece.segment for part in sizes[0].parts), plan.microbatches)
    schedule = _schedule(made, pipeline)
    places = list(graphs)
    return InPieces(made, sizes, tuple(places.index(key) for key in keys), pipeline, schedule, tuple(examples), dims)


def _schedule(plan: Plan, pipeline: Pipeline) -> Schedule:
    said = plan.schedule
    if isinstance(said, str):
        return make_schedule(said or ("1f1b" if len(pipeline.segments) > 1 else "gpipe"), pipeline)
    schedule = said if isinstance(said, Schedule) else said(pipeline)
    check_schedule(pipeline, schedule)
    return schedule


def batch_dims(subject: Subject, graph: Graph) -> tuple[BatchDim, ...] | None:
    """The batch dim of each tensor of the example; None if nobody said."""
    told = subject.batch_dims
    if told is None:
        return None
    if isinstance(told, Mapping):
        return tuple(told.get(one.where) for one in graph.inputs)
    return tuple(told)


def _tensors(arguments: Any) -> Sequence[Any]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _as_example(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = arguments
    return kwargs if kwargs and not args else args

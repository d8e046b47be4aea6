"""A plan in micro-batches, compiled: pieces, schedule, files.

In: a subject and a plan that cuts the batch. Out: an InPieces: the plan at each size that micro-batches have, proven
piece by piece, the schedule, proven too, and the files of the pipeline.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.capture.example import split_example
from weft.codegen.form import form_of
from weft.codegen.pipeline import generate_pipeline, one_piece
from weft.compile.model_file import Subject
from weft.compile.replan import lower_replanned
from weft.compile.subject import capture_subject
from weft.cost.links import Links
from weft.errors import PlanError, RunError
from weft.ir.graph import Graph
from weft.ir.layout import Layout
from weft.ir.program import Program
from weft.ir.schedule import Pipeline, Schedule
from weft.lower.check import check
from weft.lower.pipeline import Pipelined, lower_pieces
from weft.lower.spans import spans_of
from weft.ops.book import RuleBook
from weft.order import Span
from weft.order.stage_names import said_schedule
from weft.plan.batch import batch_dims_of, mixing_ops
from weft.plan.plan import Plan
from weft.runtime.program.calling import Arguments
from weft.runtime.training.microbatches import BatchDim, TooFewRows, dims_of, split_arguments

T = TypeVar("T")


@dataclass(frozen=True)
class InPieces:
    """A pipeline, ready to run.

    Args:
        schedule: without events if the only piece is a program of the whole batch, which its user calls.
        examples: the micro-batches of the example, as arguments.
        size_of: which of `sizes` each has.
        dims: the batch dim of each tensor of the example.
        whole: the graph of the whole batch.
        returns: of forwards alone, in evaluation: tensors that every device gets. None in training.
        joins: for each of those the dim along which micro-batches are joined, or LOSS; None: the batch is not cut.
    """

    plan: Plan
    sizes: tuple[Pipelined, ...]
    size_of: tuple[int, ...]
    pipeline: Pipeline
    schedule: Schedule
    examples: tuple[Any, ...]
    dims: tuple[BatchDim, ...] | None
    whole: Graph
    returns: tuple[str, ...] | None = None
    joins: tuple[int, ...] | None = ()

    @staticmethod
    def of(plan: Plan, program: Program) -> InPieces:
        """A program of the whole batch."""
        found = one_piece(program)
        pipeline = Pipeline((found.parts[0].piece.segment,), 1)
        return InPieces(plan, (found,), (0,), pipeline, Schedule({}), (), None, program.graph)

    @property
    def program(self) -> Program | None:
        """That of the whole batch, if the plan has neither stages nor micro-batches."""
        return None if self.schedule.events else self.sizes[0].parts[0].program

    @property
    def spans(self) -> dict[str, Span]:
        """How long the phases of each piece take, as is estimated."""
        return spans_of(self.sizes[0])

    def files(self, about: Mapping[str, Any] | None = None, *, traced: bool = False) -> dict[str, bytes]:
        """Of the program, by name.

        Args:
            about: where it comes from.
            traced: every op tells what it made.
        """
        batch = {"size_of": list(self.size_of), "dims": self.dims, "batch": form_of(self.whole).to_json()}
        told = {**batch, "joins": self.joins, **(about or {})}
        return generate_pipeline(self.sizes, self.schedule, about=told, returns=self.returns or (), traced=traced)


def is_in_pieces(plan: Plan) -> bool:
    """True if a plan runs a step in micro-batches, or stage by stage."""
    return plan.microbatches > 1 or bool(plan.stages)


def refuse_inference(plan: Plan) -> None:
    """A schedule without backwards is none to train by."""
    if plan.schedule == "inference":
        raise PlanError(
            "schedule=inference runs forwards alone: nothing would be trained",
            place="schedule=inference",
            remedy="leave out schedule=; eval() of what was trained runs forwards alone by itself",
        )


@dataclass(frozen=True)
class Prepared:
    """Micro-batches, captured and planned: all that a program in pieces is made from.

    Args:
        whole: the plan of the whole batch.
        plans: one for each size that micro-batches have; size_of, examples, dims: as of InPieces.
    """

    whole: Plan
    plans: tuple[Plan, ...]
    size_of: tuple[int, ...]
    examples: tuple[Any, ...]
    dims: tuple[BatchDim, ...] | None


def prepare_pieces(subject: Subject, plan: Plan, make: Callable[[Graph], Plan]) -> Prepared:
    """Cut the example, capture a micro-batch of each size, and plan it.

    Args:
        plan: made for the whole batch; tells how many micro-batches there are.
        make: plans the graph of a micro-batch.
    """
    dims = batch_dims(subject, plan.graph)
    if plan.microbatches > 1 and subject.batch_dims is None:
        _warn_of_mixing(plan, dims)
    args, kwargs = split_example(subject.example)
    try:
        examples, _ = split_arguments(args, dict(kwargs), dims, plan.microbatches)
    except TooFewRows as error:
        raise PlanError(
            str(error), place=f"microbatches={plan.microbatches}", remedy="use fewer micro-batches, or a larger batch"
        ) from None
    # a batch that is not cut is captured and planned
    plans, size_of = (
        ((plan,), (0,))
        if len(examples) == 1
        else by_size(examples, lambda one: make(capture_subject(replace(subject, example=as_example(one)))))
    )
    return Prepared(plan, plans, size_of, tuple(examples), dims)


def warn_of_marks(graph: Graph, dims: Sequence[BatchDim] | None) -> None:
    """Say that marks have no effect: a pipeline serves other numbers of rows, each by a program of its own."""
    inputs = {one.tensor: (one.where, dim) for one, dim in zip(graph.inputs, dims_in(graph, dims), strict=True)}
    for tensor, dim in graph.symbols.values():
        where, rows = inputs[tensor]
        if rows is None or dim != rows % len(graph.tensors[tensor].shape):
            warnings.warn(
                f"dim {dim} of {where} is marked (weft.dynamic), which a plan in stages or micro-batches does not act "
                "upon: batches have the example's sizes in all dims but that of the rows",
                stacklevel=2,
            )


def by_size(examples: Sequence[Arguments], make: Callable[[Arguments], T]) -> tuple[tuple[T, ...], tuple[int, ...]]:
    """What is made of the first example of each size, and which of the sizes each example has."""
    found: dict[str, T] = {}
    size_of = []
    for one in examples:
        key = str([tuple(tensor.shape) for tensor in tensors_in(one)])
        if key not in found:
            found[key] = make(one)
        size_of.append(list(found).index(key))
    return tuple(found.values()), tuple(size_of)


def _warn_of_mixing(plan: Plan, dims: Sequence[BatchDim] | None) -> None:
    """Say it where micro-batches are not what the user may take them for."""
    mixing = mixing_ops(plan.graph, plan.rules, dims_in(plan.graph, dims))
    if mixing:
        warnings.warn(
            f"{mixing[0].name} ({mixing[0].place}) takes rows of the batch apart or together: on micro-batches it "
            "gives other numbers than on the whole batch; if dim 0 of an input is not the batch, name it (batch_dims)",
            stacklevel=2,
        )


def lower_prepared(found: Prepared, *, links: Links | None = None) -> InPieces:
    """Pieces at each size, proven, and their schedule, proven too."""
    made, *others = found.plans
    sizes = [lower_pieces(made, links=links)]
    for anew in others:
        sizes.append(at_other_size(sizes[0], made, anew.graph, _planned(anew), links))
    check_parts(sizes)
    pipeline = Pipeline(tuple(part.piece.segment for part in sizes[0].parts), found.whole.microbatches)
    schedule = said_schedule(pipeline, made.schedule, made.orders, _stages(sizes[0]))
    _refuse_shuffled(sizes[0], schedule)
    return InPieces(
        plan=made,
        sizes=tuple(sizes),
        size_of=found.size_of,
        pipeline=pipeline,
        schedule=schedule,
        examples=found.examples,
        dims=found.dims,
        whole=found.whole.graph,
    )


def check_parts(sizes: Sequence[Pipelined]) -> None:
    """Prove the program of every piece at every size."""
    for part in (part for one in sizes for part in one.parts):
        check(part.program)


def _planned(plan: Plan) -> Callable[[Graph], Plan]:
    """Plans a graph that is planned already."""
    return lambda graph: plan


def _refuse_shuffled(found: Pipelined, schedule: Schedule) -> None:
    """What a buffer becomes depends on the order of the micro-batches: it is that of one device."""
    for part in found.parts:
        name, changed = part.piece.segment.name, [one for one in part.program.graph.buffers if one.update is not None]
        row = schedule.events[part.piece.segment.devices[0]]
        order = [event.number for event in row if event.segment == name and event.phase == "f"]
        if changed and order != sorted(order):
            raise PlanError(
                f"stage {name} changes buffer {changed[0].names[0]}, so its micro-batches cannot run forward in the "
                f"order {' '.join(map(str, order))}",
                remedy="run its forwards in the order of the micro-batches",
            )


def at_other_size(
    first: Pipelined, made: Plan, graph: Graph, make: Callable[[Graph], Plan], links: Links | None
) -> Pipelined:
    """The plan for micro-batches of another size: the same stages, and weights that lie where they lay."""
    kept = stored_in(first)
    _, found = lower_replanned(
        made,
        graph,
        make,
        keeps=lambda pipelined: stored_in(pipelined) == kept,
        refusal=PlanError(
            "micro-batches of different sizes would keep their weights in different places",
            place=f"{made.microbatches} micro-batches",
            remedy="use a batch whose rows are a multiple of the micro-batches",
        ),
        links=links,
    )
    return found


def stored_in(found: Pipelined) -> list[tuple[str, tuple[int, ...], dict[str, Layout]]]:
    """What each piece keeps from step to step, and how."""
    kept = []
    for part in found.parts:
        graph, segment = part.program.graph, part.piece.segment
        names = (*graph.parameter_tensors, *(one.tensor for one in graph.buffers))
        kept.append((segment.name, segment.devices, {name: part.program.stored[name] for name in names}))
    return kept


def _stages(pipelined: Pipelined) -> dict[str, tuple[str, ...]]:
    """The segments that each stage and block has become."""
    found: dict[str, tuple[str, ...]] = {}
    for part in pipelined.parts:
        if part.piece.stage:
            found[part.piece.stage] = (*found.get(part.piece.stage, ()), part.piece.segment.name)
    return found


def batch_dims(subject: Subject, graph: Graph) -> tuple[BatchDim, ...] | None:
    """The batch dim of each tensor of the example; None if nobody said and sizes tell."""
    told = subject.batch_dims
    if told is None:
        found = batch_dims_of(graph, RuleBook(graph))
        return None if found == dims_in(graph) else found
    if isinstance(told, Mapping):
        return tuple(told.get(one.where) for one in graph.inputs)
    return tuple(told)


def dims_in(graph: Graph, told: Sequence[BatchDim] | None = None) -> tuple[BatchDim, ...]:
    """The batch dim of each input: as told, else as sizes tell."""
    return tuple(dims_of([graph.tensors[one.tensor].sizes for one in graph.inputs]) if told is None else told)


def tensors_in(arguments: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]


def as_example(batch: Arguments) -> Any:
    """A batch as an example."""
    args, kwargs = batch
    if args and kwargs:
        raise RunError(
            "a batch of other arguments than the example's is given partly by position, partly by keyword",
            remedy="give all of them by keyword",
        )
    return args or kwargs


def stretched(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A tensor of another size along a dim: its elements repeated from the start, or left out from the end."""
    return tensor.detach().index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])

"""Replan: another graph of a planned model, laid out so that its weights are stored where they were.

In: a plan, another graph of the same model (micro-batches of another size, evaluation), and what is to be kept. Out: a
plan for it and its pieces: what the plan says when it is said of this graph; else as it was said of the first; else
with one axis along which nothing is cut: a small batch need not be cut as a large one is, and copies give its numbers
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from weft.cost.links import Links
from weft.errors import PlanError
from weft.ir.graph import Graph, Op
from weft.lower.pipeline import Pipelined, lower_pieces
from weft.plan.lines import Line, StageLine, TransLine
from weft.plan.plan import Plan
from weft.plan.primitives import CopyOver, CutBy
from weft.plan.select import select

Make = Callable[[Graph], Plan]


def lower_replanned(
    plan: Plan,
    graph: Graph,
    make: Make,
    *,
    keeps: Callable[[Pipelined], bool],
    refusal: PlanError,
    links: Links | None = None,
) -> tuple[Plan, Pipelined]:
    """The first way to lay a graph out that keeps what it is to keep.

    Args:
        plan: of another graph of the same model.
        make: says what the plan says of any graph.
        refusal: if there is no such way, and none is refused by itself.
    """
    reason: PlanError | None = None
    stages = stages_like(plan, graph)
    for attempt in _attempts(plan, graph, make):
        try:
            own = tuple(line for line in attempt() if not isinstance(line, StageLine))
            tried = Plan(graph, plan.devices, (*own, *stages))
            found = lower_pieces(tried, links=links)
        except PlanError as error:
            # cuts of the one graph need not be cuts of the other
            reason = reason or error
            continue
        if keeps(found):
            return tried, found
    raise reason or refusal


def _attempts(plan: Plan, graph: Graph, make: Make) -> Iterator[Callable[[], tuple[Line, ...]]]:
    yield lambda: make(graph).lines
    yield lambda: plan.lines
    for axis in plan.axes:
        yield lambda axis=axis: tuple(_uncut(line, axis) for line in plan.lines)  # type: ignore[misc]


def _uncut(line: Line, axis: str) -> Line:
    """The line with copies in place of cuts along an axis."""
    if not isinstance(line, TransLine):
        return line
    return replace(
        line,
        transforms=tuple(
            CopyOver(one.size, axis) if isinstance(one, CutBy) and one.axis == axis else one for one in line.transforms
        ),
    )


def stages_like(plan: Plan, graph: Graph) -> tuple[StageLine, ...]:
    """The stages of a plan, said of another graph of the same model.

    An op that both graphs have is where it was. One that only this graph has is where other ops of its module are, else
    where what it reads is made, else where it is read.
    """
    paths: dict[str, str] = {}
    for op in plan.graph.ops:
        if op.name in plan.stages:
            paths.setdefault(op.path, plan.stages[op.name].name)
    found: dict[str, str] = {}
    for op in graph.ops:
        known = plan.graph.by_name.get(op.name)
        if known is not None and known.target == op.target:
            if op.name in plan.stages:
                found[op.name] = plan.stages[op.name].name
        elif stage := paths.get(op.path) or _stage_before(graph, op, found):
            found[op.name] = stage
    lines = [line for line in plan.lines if isinstance(line, StageLine)]
    placed = ((line, [name for name, stage in found.items() if stage == line.name]) for line in lines)
    return tuple(replace(line, ops=select(graph, names)) for line, names in placed if names)


def _stage_before(graph: Graph, op: Op, found: Mapping[str, str]) -> str | None:
    makers = [graph.producers[name].name for name in op.inputs if name in graph.producers]
    return next((found[name] for name in reversed(makers) if name in found), None)

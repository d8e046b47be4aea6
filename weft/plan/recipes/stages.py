"""Stages of a pipeline: where to cut a model, so that the parts weigh alike and little crosses.

In: a Graph, its rules, a number of stages (or the modules at which they begin). Out: for each stage the ops in it, a
run of the program's own order: any cut of that order is possible, not only one between layers. A stage weighs what its
ops compute and move in a step, what crosses to it, and the memory of its weights and of what it keeps for backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.ir.graph import Graph, Op
from weft.ops.book import RuleBook
from weft.ops.work import light_ops, work_of

CROSSING = 40.0
"""Floating-point operations that take as long as a byte from stage to stage."""
MEMORY = 0.1
"""How much an even share of memory counts against an even share of time."""
STATES = 4
"""A trained weight, its gradient and two moments of an optimizer."""
MOST_CUTS = 300
"""Places at which a cut is tried."""


@dataclass(frozen=True)
class _Weights:
    """Sums over the first i ops: seconds in operations, bytes held; and bytes that cross a cut before op i."""

    time: tuple[float, ...]
    memory: tuple[float, ...]
    crossing: tuple[float, ...]


def stages_of(
    graph: Graph,
    book: RuleBook,
    count: int,
    begins: Sequence[str] = (),
    *,
    without: Collection[str] = (),
    cuts: Collection[str] | None = None,
) -> list[tuple[Op, ...]]:
    """The ops of each stage. What every piece may make for itself is in none (`light_ops`), nor is `without`.

    Args:
        begins: modules at which the stages after the first begin; balanced by weight if not given.
        cuts: ops at which a balanced stage may begin; any if not given.
    """
    ops = [op for op in heavy_ops(graph, book) if op.name not in without]
    edges = _begun_at(ops, begins) if begins else _balanced(graph, book, ops, count, cuts)
    return [tuple(ops[start:stop]) for start, stop in itertools.pairwise((0, *edges, len(ops)))]


def _balanced(graph: Graph, book: RuleBook, ops: Sequence[Op], count: int, cuts: Collection[str] | None) -> list[int]:
    if len(ops) < count:
        raise PlanError(
            f"{count} stages for a model of {len(ops)} operators that compute something: a stage would have no work",
            remedy=f"ask for at most {len(ops)} stages",
        )
    weights = _weigh(graph, book, ops)
    if cuts is None:
        candidates = _candidates(weights, len(ops), count)
    else:
        candidates = [at for at, op in enumerate(ops) if at and op.name in cuts]
    return _best_cuts(weights, candidates, len(ops), count)


def _begun_at(ops: Sequence[Op], modules: Sequence[str]) -> list[int]:
    """The first ops of stages that begin at these modules."""
    edges = [0]
    for module in modules:
        inside = [at for at, op in enumerate(ops) if op.path == module or op.path.startswith(f"{module}.")]
        if not inside:
            raise PlanError(
                f"no module {module!r} computes anything, so no stage can begin there",
                remedy=f"name modules such as {', '.join(_some_paths(ops))}",
            )
        if inside[0] <= edges[-1]:
            raise PlanError(
                f"the stage that begins at {module!r} would leave none before it with work",
                remedy="name modules in the order in which they run, the first one's stage left out",
            )
        edges.append(inside[0])
    return edges[1:]


def heavy_ops(graph: Graph, book: RuleBook) -> list[Op]:
    """The ops that pieces do not make for themselves."""
    light = light_ops(graph, book)
    return [op for op in graph.ops if op.name not in light]


def _some_paths(ops: Sequence[Op]) -> list[str]:
    return list(dict.fromkeys(op.path for op in ops if op.path))[:4]


def _weigh(graph: Graph, book: RuleBook, ops: Sequence[Op]) -> _Weights:
    place = {name: at for at, op in enumerate(ops) for name in op.outputs}
    time, memory, crossing = [0.0], [0.0], [0.0] * (len(ops) + 1)
    seen: set[str] = set()
    for op in ops:
        # backward takes about twice as long as forward
        time.append(time[-1] + work_of(op, book.rule(op), graph).time * (3 if op.grad else 1))
        held = sum(graph.tensors[name].num_bytes for name in op.outputs if graph.tensors[name].needs_grad)
        for name in op.inputs:
            if name in graph.parameter_tensors and name not in seen:
                seen.add(name)
                held += graph.tensors[name].num_bytes * (STATES if graph.parameter_tensors[name].trainable else 1)
        memory.append(memory[-1] + held)
    for name, made in place.items():
        readers = [place[out] for one in graph.consumers[name] for out in one.outputs[:1] if out in place]
        for at in range(made + 1, max(readers, default=made) + 1):
            crossing[at] += graph.tensors[name].num_bytes * (2 if graph.tensors[name].needs_grad else 1)
    for start, stop in _inseparable(graph, ops):
        for at in range(start + 1, stop + 1):
            crossing[at] = math.inf
    return _Weights(tuple(time), tuple(memory), tuple(crossing))


def _inseparable(graph: Graph, ops: Sequence[Op]) -> Iterator[tuple[int, int]]:
    """First and last of the ops that use a buffer which gets new content: it lives in one stage."""
    for buffer in graph.buffers:
        if buffer.update is not None:
            users = [at for at, op in enumerate(ops) if buffer.tensor in op.inputs or buffer.update in op.outputs]
            if users:
                yield users[0], users[-1]


def _candidates(weights: _Weights, count: int, stages: int) -> list[int]:
    """Places worth a cut: what crosses there is no more than on either side."""
    inner = range(1, count)
    found = [at for at in inner if weights.crossing[at] <= min(weights.crossing[at - 1 : at + 2] or (0.0,))]
    found = found if len(found) >= stages - 1 else list(inner)
    if len(found) <= MOST_CUTS:
        return found
    return sorted(sorted(found, key=lambda at: weights.crossing[at])[:MOST_CUTS])


def _best_cuts(weights: _Weights, candidates: Sequence[int], count: int, stages: int) -> list[int]:
    """The cuts under which the heaviest stage is lightest; of equals, those over which least crosses."""
    time = weights.time[-1] / stages or 1.0
    memory = weights.memory[-1] / stages or 1.0

    def cost(start: int, stop: int) -> float:
        crossed = CROSSING * (weights.crossing[start] if start else 0.0)
        spent = (weights.time[stop] - weights.time[start] + crossed) / time
        return spent + MEMORY * (weights.memory[stop] - weights.memory[start]) / memory

    edges = [0, *candidates]
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {at: (cost(0, at), 0.0, ()) for at in candidates}
    for _ in range(stages - 2):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for at in candidates:
            options = [
                (max(best[cut][0], cost(cut, at)), best[cut][1] + weights.crossing[cut], (*best[cut][2], cut))
                for cut in edges[1:]
                if cut < at and cut in best
            ]
            if options:
                following[at] = min(options)
        best = following
    if stages == 1:
        return []
    last = [
        (max(found, cost(cut, count)), crossed + weights.crossing[cut], (*cuts, cut))
        for cut, (found, crossed, cuts) in best.items()
    ]
    return list(min(last)[2])

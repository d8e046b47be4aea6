"""Recycling: a model that runs the same modules several times, found by the weights that its ops read.

In: a Plan, a number of stages. Out: for each pass its stages: stage k of every pass holds the same modules, so it can
live on the same device and read the very same weights. The ops that read weights, in program order, make a word; a
pass is a part of it that stands there several times in a row, the longest there is. Where a pass is cut is balanced for
the last one, which is the one that is trained, together with all that comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.ir.graph import Op
from weft.plan.plan import Plan
from weft.plan.recipes.stages import heavy_ops, stages_of

START = "start"
"""The stage of what runs once, before the first pass."""


@dataclass(frozen=True)
class Turn:
    """One stage of one pass: stage `place`, and its ops."""

    name: str
    place: int
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Passes:
    """Passes found in the ops that read weights: the first one begins at `start`, each has `length` of them."""

    start: int
    length: int
    count: int


def recycled_stages(plan: Plan, stages: int, begins: Sequence[str] = ()) -> list[Turn]:
    """The stages of every pass, in program order."""
    ops = heavy_ops(plan.graph, plan.rules)
    weights = plan.graph.parameter_tensors
    readers = [at for at, op in enumerate(ops) if any(name in weights for name in op.inputs)]
    words = [tuple(name for name in ops[at].inputs if name in weights) for at in readers]
    found = repeated(words, stages)
    if found is None:
        raise PlanError(
            f"nf1b runs the same modules in several passes, but {plan.graph.name} has no run of at least {stages} "
            "operators with weights that it calls twice",
            remedy="use schedule=1f1b, or fewer stages",
        )
    starts = [readers[found.start + turn * found.length] for turn in range(found.count)]
    begun = _begun(plan, ops, readers, found, stages, begins)
    turns: list[Turn] = []
    if found.start:
        turns.append(Turn(START, 0, tuple(ops[: starts[0]])))
    for turn in range(found.count):
        first = found.start + turn * found.length
        edges = [readers[first + at] for at in begun]
        if turn == 0 and not found.start:
            edges[0] = 0
        edges.append(starts[turn + 1] if turn + 1 < found.count else len(ops))
        for place in range(stages):
            name = f"{place}@{turn}" if turn else str(place)
            turns.append(Turn(name, place, tuple(ops[edges[place] : edges[place + 1]])))
    return turns


def repeated(words: Sequence[object], shortest: int) -> Passes | None:
    """The part that stands several times in a row and covers most; of equals, the one with most passes.

    >>> repeated("xabcabcabcy", 2)
    Passes(start=1, length=3, count=3)
    """
    best: tuple[int, int, Passes] | None = None
    for length in range(max(shortest, 1), len(words) // 2 + 1):
        run = 0
        for at in range(len(words) - length):
            run = run + 1 if words[at] == words[at + length] else 0
            count = run // length + 1
            if run >= length and (best is None or (count * length, count) > best[:2]):
                best = (count * length, count, Passes(at + 1 - run, length, count))
    return None if best is None else best[2]


def _begun(
    plan: Plan, ops: Sequence[Op], readers: Sequence[int], found: Passes, stages: int, begins: Sequence[str]
) -> list[int]:
    """At which of a pass's ops with weights each stage begins."""
    first = found.start + (found.count - 1) * found.length
    last = readers[first : first + found.length]
    outside = {op.name for op in ops[: last[0]]}
    names = [ops[at].name for at in last]
    parts = stages_of(plan.graph, plan.rules, stages, begins, without=outside, cuts=names[1:])
    place = {op.name: at for at, op in enumerate(ops)}
    begun = [0]
    for part in parts[1:]:
        at = next((number for number, reader in enumerate(last) if reader >= place[part[0].name]), None)
        if at is None or at <= begun[-1]:
            raise PlanError(
                f"the stage that begins at {part[0].path or part[0].name} holds none of the modules that run again",
                place=part[0].place,
                remedy="begin each stage at a module with weights inside the passes, in the order in which they run",
            )
        begun.append(at)
    return begun

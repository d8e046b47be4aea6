"""Cells: the calls that the ranks of a team make for one op, seen as one call.

In: a Compute and the ranks that run its text. Out: a Pattern: the call with what is the same on all of them as it is,
and `Varying` where cells differ. Rules are asked once per distinct part of the op, not once per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir.graph import Op
from weft.ir.layout import Cell
from weft.ir.oplayout import Cut
from weft.ir.program import Compute
from weft.lower.script import numbered
from weft.ops.book import RuleBook
from weft.ops.derive import cell_view
from weft.ops.rule import Call
from weft.runtime.random import Draw

Where = tuple[int, int]
"""A rank and a slot."""


@dataclass(frozen=True)
class Varying:
    """A place in a call where cells differ: the value of every distinct cell."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class DrawPattern:
    """A random draw whose intervals may differ."""

    number: int
    shape: tuple[int, ...]
    at: tuple[Any, ...]
    whole: Any
    """The intervals of all dims together."""


@dataclass(frozen=True)
class Pattern:
    """One call of many cells. `which`: the distinct cell that each rank and slot is."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    which: dict[Where, int]


class Cells:
    """Patterns of ops."""

    def __init__(self, book: RuleBook) -> None:
        self._book = book

    def patterns(self, op: Op, step: Compute, where: Sequence[Where]) -> list[Pattern]:
        """The op's calls at these places: one pattern, unless cells call different functions."""
        rule = self._book.rule(op)
        if rule.local is None:
            args, kwargs = numbered(op)
            return [Pattern(op.target, args, kwargs, dict.fromkeys(where, 0))]
        grid = step.layout.grid
        cutting = [i for i, use in enumerate(step.layout.uses) if isinstance(use, Cut)]
        found: dict[tuple[int, ...], int] = {}
        calls: list[Call] = []
        which: dict[Where, int] = {}
        for rank, slot in where:
            cell: Cell = grid.cells_on[rank][slot]
            key = tuple(cell[i] for i in cutting)
            if key not in found:
                view = cell_view(rule, step.layout, cell, self._book.inputs(op), self._book.outputs(op))
                call = rule.local(op, view)
                found[key] = next((i for i, other in enumerate(calls) if other == call), len(calls))
                if found[key] == len(calls):
                    calls.append(call)
            which[rank, slot] = found[key]
        return [_pattern(group, which) for group in _by_form(calls)]


def _by_form(calls: list[Call]) -> list[dict[int, Call]]:
    """The calls by function and number of arguments."""
    forms: dict[Any, dict[int, Call]] = {}
    for i, call in enumerate(calls):
        form = call.target, len(call.args), tuple(name for name, _ in call.kwargs)
        forms.setdefault(form, {})[i] = call
    return list(forms.values())


def _pattern(calls: dict[int, Call], which: dict[Where, int]) -> Pattern:
    order = {number: i for i, number in enumerate(calls)}
    trees = list(calls.values())
    return Pattern(
        trees[0].target,
        tuple(merged([tree.args[i] for tree in trees]) for i in range(len(trees[0].args))),
        tuple(
            (name, merged([tree.kwargs[i][1] for tree in trees])) for i, (name, _) in enumerate(trees[0].kwargs)
        ),
        {where: order[number] for where, number in which.items() if number in order},
    )


def merged(trees: list[Any]) -> Any:
    """Several arguments as one, Varying where they differ."""
    first = trees[0]
    if isinstance(first, Draw) and all(isinstance(t, Draw) and _head(t) == _head(first) for t in trees):
        at = tuple(merged([tree.at[dim] for tree in trees]) for dim in range(len(first.shape)))
        return DrawPattern(first.number, first.shape, at, merged_whole([tree.at for tree in trees]))
    if all(type(tree) is type(first) and tree == first for tree in trees):
        return first
    alike = all(isinstance(tree, tuple | list) and len(tree) == len(first) for tree in trees)
    if alike and not any(map(is_intervals, trees)):
        return tuple(merged([tree[i] for tree in trees]) for i in range(len(first)))
    return Varying(tuple(trees))


def merged_whole(trees: list[Any]) -> Any:
    """The same without looking inside."""
    return trees[0] if all(tree == trees[0] for tree in trees) else Varying(tuple(trees))


def _head(draw: Draw) -> tuple[int, tuple[int, ...]]:
    return draw.number, draw.shape


def is_intervals(value: Any) -> bool:
    """True for a list of intervals, which belong together."""
    return (
        isinstance(value, tuple)
        and bool(value)
        and all(isinstance(one, tuple) and len(one) == 2 and all(type(n) is int for n in one) for one in value)
    )

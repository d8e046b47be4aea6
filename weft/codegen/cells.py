"""Cells: the calls that the ranks of a team make for one op, seen as one call.

In: a Compute and the ranks that run its text. Out: a Pattern: the call with what is the same on all of them as it is,
and `Varying` where cells differ. Rules are asked once per distinct part of the op, not once per rank; on large grids
whose axes cut different dims evenly only along each axis, which is compared with a sample of all cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir.graph import Op
from weft.ir.layout import Cell, Grid
from weft.ir.oplayout import Cut
from weft.ir.program import Compute
from weft.ir.ranges import count
from weft.ops.arguments import numbered
from weft.ops.book import RuleBook
from weft.ops.derive import cell_view
from weft.ops.rule import Call
from weft.runtime.random import Draw

MANY = 64
"""Up to so many distinct cells all are asked."""

Where = tuple[int, int]
"""A rank and a slot."""


Key = int | tuple[int, ...]
"""A distinct cell: its number, or its coordinates on the axes that cut the op."""


@dataclass(frozen=True)
class Varying:
    """A place in a call where cells differ: the values of distinct cells, or along one axis (`pick`)."""

    values: tuple[Any, ...]
    pick: int | None = None

    def at(self, key: Key) -> Any:
        """The value of a distinct cell."""
        if isinstance(key, tuple):
            assert self.pick is not None
            return self.values[key[self.pick]]
        return self.values[key]


@dataclass(frozen=True)
class DrawPattern:
    """A random draw whose intervals may differ."""

    number: int
    shape: tuple[int, ...]
    at: tuple[Any, ...]
    whole: Any
    """The intervals of all dims together; None where each dim follows an axis of its own."""

    def intervals(self, key: Key) -> Any:
        """The intervals of one distinct cell."""
        if self.whole is not None:
            return self.whole.at(key) if isinstance(self.whole, Varying) else self.whole
        return tuple(at.at(key) if isinstance(at, Varying) else at for at in self.at)


@dataclass(frozen=True)
class Pattern:
    """One call of many cells. `which`: the distinct cell that each rank and slot is. `function`: the user's."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    which: Mapping[Where, Key]
    function: Callable[..., Any] | None = None


class Cells:
    """Patterns of ops."""

    def __init__(self, book: RuleBook) -> None:
        self._book = book

    def patterns(self, op: Op, step: Compute, where: Sequence[Where]) -> list[Pattern]:
        """The op's calls at these places: one pattern, unless cells call different functions."""
        rule = self._book.rule(op, step.layout.algorithm)
        if rule.local is None:
            args, kwargs = numbered(op)
            return [Pattern(op.target, args, kwargs, dict.fromkeys(where, 0))]
        grid = step.layout.grid
        cutting = [i for i, use in enumerate(step.layout.uses) if isinstance(use, Cut)]

        def call(cell: Cell) -> Call:
            assert rule.local is not None
            return rule.local(op, cell_view(rule, step.layout, cell))

        keys = {where_: tuple(grid.cells_on[where_[0]][where_[1]][i] for i in cutting) for where_ in where}
        if len(set(keys.values())) > MANY and self._is_even(op, step):
            along = _along_axes(call, grid.sizes, cutting)
            if along is not None:
                return [Pattern(along.target, along.args, along.kwargs, keys, along.function)]
        return _all_cells(call, grid, keys)

    def _is_even(self, op: Op, step: Compute) -> bool:
        """True if every dim is cut along one axis at most, into parts of one length."""
        operands = self._book.operands(op, step.layout)
        for one in (*operands.inputs, *operands.outputs):
            for axes, table in zip(one.layout.axes_of, one.layout.ranges, strict=True):
                if len(axes) > 1 or (table is not None and len(set(map(count, table))) > 1):
                    return False
        return True


def _all_cells(call: Callable[[Cell], Call], grid: Grid, keys: Mapping[Where, tuple[int, ...]]) -> list[Pattern]:
    """Patterns from the calls of all distinct cells."""
    found: dict[tuple[int, ...], int] = {}
    calls: dict[Call, int] = {}
    which: dict[Where, int] = {}
    for (rank, slot), key in keys.items():
        if key not in found:
            made = call(grid.cells_on[rank][slot])
            found[key] = calls.setdefault(made, len(calls))
        which[rank, slot] = found[key]
    return [_pattern(group, which) for group in _by_form(list(calls))]


def _along_axes(call: Callable[[Cell], Call], sizes: Sequence[int], cutting: Sequence[int]) -> Call | None:
    """The call with what differs along one axis as Varying; None if something differs along several."""
    origin = [0] * len(sizes)
    lines = []
    for axis in cutting:
        lines.append([call(tuple(at if i == axis else 0 for i in range(len(sizes)))) for at in range(sizes[axis])])
    first = call(tuple(origin))
    if any(_form_of(one) != _form_of(first) for line in lines for one in line):
        return None
    try:
        args = tuple(_crossed([[one.args[i] for one in line] for line in lines]) for i in range(len(first.args)))
        kwargs = tuple(
            (name, _crossed([[one.kwargs[i][1] for one in line] for line in lines]))
            for i, (name, _) in enumerate(first.kwargs)
        )
    except _SeveralAxes:
        return None
    found = Call(first.target, args, kwargs, first.function)
    choices = [sorted({0, size // 3, size - 1}) if i in cutting else [0] for i, size in enumerate(sizes)]
    for cell in itertools.product(*choices):
        key = tuple(cell[i] for i in cutting)
        if _filled(found, key) != call(cell):
            return None
    return found


class _SeveralAxes(Exception):  # noqa: N818 - says what was found
    """A place differs along more than one axis."""


def _crossed(lines: list[list[Any]]) -> Any:
    """One argument from its values along each axis."""
    different = [i for i, line in enumerate(lines) if any(one != line[0] for one in line)]
    if not different:
        return lines[0][0] if not isinstance(lines[0][0], Draw) else merged([lines[0][0]])
    first = lines[0][0]
    if isinstance(first, Draw):
        at = tuple(_crossed([[one.at[dim] for one in line] for line in lines]) for dim in range(len(first.shape)))
        return DrawPattern(first.number, first.shape, at, None)
    if len(different) == 1:
        line = lines[different[0]]
        alike = (
            all(isinstance(one, tuple) and len(one) == len(first) for one in line)
            if first.__class__ is tuple
            else False
        )
        if not alike or any(map(is_intervals, line)):
            return Varying(tuple(line), different[0])
    if not isinstance(first, tuple) or any(map(is_intervals, (one for line in lines for one in line))):
        raise _SeveralAxes
    if any(not isinstance(one, tuple) or len(one) != len(first) for line in lines for one in line):
        raise _SeveralAxes
    return tuple(_crossed([[one[i] for one in line] for line in lines]) for i in range(len(first)))


def _filled(call: Call, key: tuple[int, ...]) -> Call:
    """The call of one cell."""

    def fill(value: Any) -> Any:
        match value:
            case Varying():
                return value.at(key)
            case DrawPattern():
                return Draw(value.number, value.shape, tuple(fill(one) for one in value.at))
            case tuple():
                return tuple(fill(one) for one in value)
            case _:
                return value

    return Call(call.target, tuple(map(fill, call.args)), tuple((name, fill(value)) for name, value in call.kwargs))


def _form_of(call: Call) -> Any:
    return call.target, len(call.args), tuple(name for name, _ in call.kwargs)


def _by_form(calls: list[Call]) -> list[dict[int, Call]]:
    """The calls by function and number of arguments."""
    forms: dict[Any, dict[int, Call]] = {}
    for i, call in enumerate(calls):
        forms.setdefault(_form_of(call), {})[i] = call
    return list(forms.values())


def _pattern(calls: dict[int, Call], which: dict[Where, int]) -> Pattern:
    order = {number: i for i, number in enumerate(calls)}
    trees = list(calls.values())
    return Pattern(
        trees[0].target,
        tuple(merged([tree.args[i] for tree in trees]) for i in range(len(trees[0].args))),
        tuple((name, merged([tree.kwargs[i][1] for tree in trees])) for i, (name, _) in enumerate(trees[0].kwargs)),
        {where: order[number] for where, number in which.items() if number in order},
        trees[0].function,
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

"""Cells: the calls that the ranks of a team make for one op, seen as one call.

In: a Compute and the ranks that run its text. Out: a Pattern: the call with what is the same on all of them as it is,
and `Varying` where cells differ. Rules are asked once per distinct part of the op, not once per rank; on large grids
whose axes cut different dims evenly only along each axis, which is compared with a sample of all cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


Key = tuple[int, ...]
"""A distinct cell: its number alone, or its coordinates on the axes that cut the op."""


@dataclass(frozen=True)
class Varying:
    """A place in a call where cells differ: the values by one number of their keys."""

    values: tuple[Any, ...]
    pick: int = 0

    def at(self, key: Key) -> Any:
        """The value of a distinct cell."""
        return self.values[key[self.pick]]


@dataclass(frozen=True)
class DrawPattern:
    """A random draw whose intervals may differ."""

    number: int
    shape: tuple[int, ...]
    at: tuple[Any, ...]

    def intervals(self, key: Key) -> Any:
        """The intervals of one distinct cell."""
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
            return [Pattern(op.target, args, kwargs, dict.fromkeys(where, (0,)))]
        grid = step.layout.grid
        cutting = [i for i, use in enumerate(step.layout.uses) if isinstance(use, Cut)]

        def call(cell: Cell) -> Call:
            assert rule.local is not None
            return rule.local(op, cell_view(rule, step.layout, cell))

        keys = {where_: tuple(grid.cells_on[where_[0]][where_[1]][i] for i in cutting) for where_ in where}
        if len(set(keys.values())) > MANY and self._is_even(op, step):
            along = _along_axes(call, grid.sizes, cutting)
            if along is not None:
                return [_pattern(along, keys)]
        return _all_cells(call, grid, keys)

    def _is_even(self, op: Op, step: Compute) -> bool:
        """True if every dim is cut along one axis at most, into parts of one length."""
        operands = self._book.operands(op, step.layout)
        for one in (*operands.inputs, *operands.outputs):
            for axes, table in zip(one.layout.axes_of, one.layout.ranges, strict=True):
                if len(axes) > 1 or (table is not None and len(set(map(count, table))) > 1):
                    return False
        return True


def _pattern(call: Call, which: Mapping[Where, Key]) -> Pattern:
    return Pattern(call.target, call.args, call.kwargs, which, call.function)


def _all_cells(call: Callable[[Cell], Call], grid: Grid, keys: Mapping[Where, Key]) -> list[Pattern]:
    """Patterns from the calls of all distinct cells: one for each function and number of arguments."""
    found: dict[Key, tuple[Any, int]] = {}
    forms: dict[Any, dict[Call, int]] = {}
    for (rank, slot), key in keys.items():
        if key not in found:
            made = call(grid.cells_on[rank][slot])
            calls = forms.setdefault(_form_of(made), {})
            found[key] = _form_of(made), calls.setdefault(made, len(calls))
    return [
        _pattern(
            _merged_call([list(calls)]),
            {where: (found[key][1],) for where, key in keys.items() if found[key][0] == form},
        )
        for form, calls in forms.items()
    ]


def _along_axes(call: Callable[[Cell], Call], sizes: Sequence[int], cutting: Sequence[int]) -> Call | None:
    """The call with what differs along one axis as Varying; None if something differs along several."""
    lines = []
    for axis in cutting:
        lines.append([call(tuple(at if i == axis else 0 for i in range(len(sizes)))) for at in range(sizes[axis])])
    if any(_form_of(one) != _form_of(lines[0][0]) for line in lines for one in line):
        return None
    try:
        found = _merged_call(lines)
    except _SeveralAxes:
        return None
    choices = [sorted({0, size // 3, size - 1}) if i in cutting else [0] for i, size in enumerate(sizes)]
    for cell in itertools.product(*choices):
        key = tuple(cell[i] for i in cutting)
        if _filled(found, key) != call(cell):
            return None
    return found


class _SeveralAxes(Exception):  # noqa: N818 - says what was found
    """A place differs along more than one axis."""


def _merged_call(lines: Sequence[Sequence[Call]]) -> Call:
    """Calls of one form as one. Each line has those of the cells that differ in one number of their keys."""
    first = lines[0][0]
    args = (_merged([[one.args[i] for one in line] for line in lines]) for i in range(len(first.args)))
    kwargs = (
        (name, _merged([[one.kwargs[i][1] for one in line] for line in lines]))
        for i, (name, _) in enumerate(first.kwargs)
    )
    return replace(first, args=tuple(args), kwargs=tuple(kwargs))


def _merged(lines: Sequence[Sequence[Any]]) -> Any:
    """One argument from its values, Varying where they differ."""
    first, every = lines[0][0], [one for line in lines for one in line]
    if isinstance(first, Draw) and all(isinstance(one, Draw) and _head(one) == _head(first) for one in every):
        at = (_merged([[one.at[dim] for one in line] for line in lines]) for dim in range(len(first.shape)))
        return DrawPattern(first.number, first.shape, tuple(at))
    different = [i for i, line in enumerate(lines) if any(type(one) is not type(first) or one != first for one in line)]
    if not different:
        return first
    alike = all(isinstance(one, tuple | list) and len(one) == len(first) for one in every)
    if alike and not any(map(is_intervals, every)):
        return tuple(_merged([[one[i] for one in line] for line in lines]) for i in range(len(first)))
    if len(different) > 1:
        raise _SeveralAxes
    return Varying(tuple(lines[different[0]]), different[0])


def _filled(call: Call, key: Key) -> Call:
    """The call of one cell."""

    def fill(value: Any) -> Any:
        match value:
            case Varying():
                return value.at(key)
            case DrawPattern():
                return Draw(value.number, value.shape, value.intervals(key))
            case tuple():
                return tuple(fill(one) for one in value)
            case _:
                return value

    return replace(call, args=fill(call.args), kwargs=fill(call.kwargs))


def _form_of(call: Call) -> Any:
    return call.target, len(call.args), tuple(name for name, _ in call.kwargs)


def _head(draw: Draw) -> tuple[int, tuple[int, ...]]:
    return draw.number, draw.shape


def is_intervals(value: Any) -> bool:
    """True for a list of intervals, which belong together."""
    return (
        isinstance(value, tuple)
        and bool(value)
        and all(isinstance(one, tuple) and len(one) == 2 and all(type(n) is int for n in one) for one in value)
    )

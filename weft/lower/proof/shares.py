"""Shares of sums: which addends of a value hold anything, and hence in how many cells its sum is complete.

In: layouts, and what steps do to them. Out: a `Live` for each value, and counts for the Report. Nothing here decides
whether a Program is right: a sum in addends is right wherever they lie.

A share is named by the first place (device, slot) that holds a part of it, so that layouts with the same parts
have the same names. A value that is no sum has one share. Where one share alone holds anything, it holds the complete
sum; where several do, none is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from weft.ir.layout import Cell, Layout
from weft.ir.merge import Merge
from weft.ir.oplayout import OpLayout
from weft.ir.ranges import count
from weft.lower.proof.moves import Proven, num_shares
from weft.lower.proof.ops import OpType

Live = frozenset[tuple[int, int]]
"""The shares that hold anything."""


class Shares:
    """Names of shares, and which of them are live; each worked out once."""

    def __init__(self) -> None:
        self._names: dict[Layout, dict[Cell, tuple[int, int]]] = {}
        self._known: dict[object, Live] = {}
        self._empty: dict[Layout, int] = {}

    def every(self, layout: Layout) -> Live:
        """All shares of a layout."""
        if num_shares(layout) == 1:
            return self._once(layout, lambda: [(min(layout.grid.devices), 0)])
        return self._once(layout, lambda: self._of(layout).values())

    def moved(self, live: Live, source: Layout, target: Layout, proven: Proven) -> Live:
        """After a move."""
        if num_shares(target) == 1:
            return self.every(target)

        def found() -> Iterable[tuple[int, int]]:
            ours, theirs = self._of(source), self._of(target)
            return (theirs[taker] for share, taker in proven.assigned.items() if ours[share] in live)

        return self._once((live, source, target), found)

    def taken(self, live: Live, outer: Layout, inner: Layout, merged: Merge) -> Live:
        """What chunks take out of a value: of several addends that one device holds, the first gets all."""
        if num_shares(inner) == 1:
            return self.every(inner)

        def found() -> Iterable[tuple[int, int]]:
            ours, theirs = self._of(outer), self._of(inner)
            for part in inner.parts():
                (held,) = outer.parts_on(part.device)
                if ours[held.share] in live and merged.first(part.cell, inner.partial_axes):
                    yield theirs[part.share]

        return self._once((live, outer, inner, "taken"), found)

    def given(self, live: Live, inner: Layout, outer: Layout) -> Live:
        """What chunks give to a value."""
        if num_shares(outer) == 1:
            return self.every(outer)

        def found() -> Iterable[tuple[int, int]]:
            ours, theirs = self._of(inner), self._of(outer)
            return (theirs[outer.parts_on(part.device)[0].share] for part in inner.parts() if ours[part.share] in live)

        return self._once((live, inner, outer, "given"), found)

    def made(self, typed: OpType, layout: OpLayout, lives: Sequence[Live]) -> Live:
        """What an op makes of operands: addends that it passes on, and addends of a sum of its own."""
        output = typed.operands.outputs[0].layout
        passed = [(i, typed.operands.inputs[i].layout) for i in sorted(typed.passed)]
        everywhere = typed.own or any(len(lives[i]) == num_shares(held) for i, held in passed)
        if num_shares(output) == 1 or (everywhere and all(all(layout.table(name)) for name in typed.space)):
            return self.every(output)

        def found() -> Iterable[tuple[int, int]]:
            names = self._of(output)
            for part in output.parts():
                sums = all(_ranges_at(layout, name, part.cell) for name in typed.space)
                arrives = any(
                    self._of(held)[held.part(part.cell).share] in lives[i] and (sums or i in typed.added)
                    for i, held in passed
                )
                if arrives or (sums and typed.own):
                    yield names[part.share]

        return self._once((id(typed), *(lives[i] for i in sorted(typed.passed))), found)

    def complete(self, layout: Layout, live: Live) -> int:
        """In how many cells the sum is complete. In an empty part it always is."""
        shares, cells = num_shares(layout), len(layout.grid.devices)
        if shares == 1:
            return cells
        empty = self._empty_parts(layout)
        return (cells + empty * (shares - 1)) // shares if len(live) == 1 else empty

    def _of(self, layout: Layout) -> Mapping[Cell, tuple[int, int]]:
        known = self._names.get(layout)
        if known is None:
            known = {}
            for part in layout.parts():
                place = (part.device, part.slot)
                known[part.share] = min(place, known.get(part.share, place))
            self._names[layout] = known
        return known

    def _once(self, key: object, find: Callable[[], Iterable[tuple[int, int]]]) -> Live:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = frozenset(find())
        return known

    def _empty_parts(self, layout: Layout) -> int:
        known = self._empty.get(layout)
        if known is None:
            known = self._empty[layout] = sum(0 in part.shape for part in layout.parts())
        return known


def _ranges_at(layout: OpLayout, name: str, cell: Cell) -> int:
    """How many indices of a cut name a cell has."""
    flat = 0
    for axis in layout.axes_cutting(name):
        flat = flat * layout.grid.sizes[axis] + cell[axis]
    return count(layout.table(name)[flat])

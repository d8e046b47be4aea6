"""Grid moves: the next steps from one layout toward another on the same grid.

In: the layout a tensor has now and the one it is to reach, over one grid with one cell per device. Out: moves that
change the role of some axes, each with its cost. The moves are

    partial  -> copy       all_reduce                     split(d) -> copy       all_gather, or its pieces by all_to_all
    partial  -> split(e)   reduce_scatter, or all_to_all  split(d) -> split(e)   all_to_all
                           and a local sum                split(d) -> split(d)   all_to_all, between range tables
    copy     -> split(e)   local slice                    copy     -> partial    local, zeros but in the first cell

Only tables of the target are split into: over some of its axes, a dim holds the union of what the target holds along
the others. Promised: routes of a move run along the changed axes only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from weft.cost.links import Links
from weft.cost.refine import marginal, united
from weft.ir.layout import COPY, PARTIAL, Layout, Role, split
from weft.ir.program import Move
from weft.ir.ranges import Ranges, count

Priced = tuple[Move, float]
Table = tuple[Ranges, ...] | None


def largest_part(layout: Layout) -> int:
    """Elements of the largest part (as if the longest ranges of all dims met in one cell)."""
    sizes = (
        size if table is None else max(map(count, table))
        for size, table in zip(layout.shape, layout.ranges, strict=True)
    )
    return math.prod(sizes)


class GridMoves:
    """The moves toward one target."""

    def __init__(self, target: Layout, itemsize: int, links: Links) -> None:
        self.target, self.itemsize, self.links = target, itemsize, links
        self._marginals: dict[tuple[int, tuple[int, ...]], tuple[Table, Table]] = {}

    def after(self, now: Layout) -> Iterator[Priced]:
        """Every move from here, cheapest or not."""
        assert now.grid == self.target.grid, f"{now} and {self.target} lie on different grids"
        yield from self._sums(now)
        yield from self._scatters(now)
        yield from self._gathers(now)
        yield from self._swaps(now)
        yield from self._sorts(now)
        yield from self._slices(now)

    def _sums(self, now: Layout) -> Iterator[Priced]:
        for axes in _subsets(self._summed(now)):
            seconds = self.links.seconds("all_reduce", _size(now, axes), self._bytes(now))
            yield Move("all_reduce", now, now.with_role(axes, COPY, {})), seconds

    def _scatters(self, now: Layout) -> Iterator[Priced]:
        for dim in self._open_dims(now):
            for axes in _subsets(self._axes(now, PARTIAL, split(dim))):
                there = now.with_role(axes, split(dim), {dim: self._table(now, dim, axes)})
                bytes = self._bytes(now)
                yield self._price("reduce_scatter", now, there, axes, bytes)
                yield self._price("all_to_all", now, there, axes, bytes)

    def _gathers(self, now: Layout) -> Iterator[Priced]:
        for dim, cut in enumerate(now.axes_of):
            for axes in _subsets(cut):
                there = now.with_role(axes, COPY, {dim: self._united(now, dim, axes)})
                bytes = self._bytes(there)
                yield self._price("all_gather", now, there, axes, bytes)
                yield self._price("all_to_all", now, there, axes, bytes)

    def _swaps(self, now: Layout) -> Iterator[Priced]:
        for dim, new in itertools.product(range(len(now.shape)), self._open_dims(now)):
            if dim == new:
                continue
            for axes in _subsets(self._axes(now, split(dim), split(new))):
                tables = {dim: self._united(now, dim, axes), new: self._table(now, new, axes)}
                there = now.with_role(axes, split(new), tables)
                bytes = self._bytes(now)
                yield self._price("all_to_all", now, there, axes, bytes)

    def _sorts(self, now: Layout) -> Iterator[Priced]:
        """The same axes, other ranges. Local if only the order within each part differs."""
        for dim, axes in enumerate(now.axes_of):
            if not axes or not set(axes) <= set(self.target.axes_of[dim]):
                continue
            table, as_sets = self._marginal(dim, axes)
            if table == now.ranges[dim]:
                continue
            there = now.with_role((), COPY, {dim: table})
            bytes = max(self._bytes(now), self._bytes(there))
            if as_sets == united(now.ranges[dim]):
                yield self._local(now, there)
            else:
                yield self._price("all_to_all", now, there, axes, bytes)

    def _slices(self, now: Layout) -> Iterator[Priced]:
        for dim in self._open_dims(now):
            for axes in _subsets(self._axes(now, COPY, split(dim))):
                yield self._local(now, now.with_role(axes, split(dim), {dim: self._table(now, dim, axes)}))
        for axes in _subsets(self._axes(now, COPY, PARTIAL)):
            yield self._local(now, now.with_role(axes, PARTIAL, {}))

    def _axes(self, now: Layout, role: Role, wanted: Role) -> tuple[int, ...]:
        return tuple(i for i, old in enumerate(now.roles) if old == role and self.target.roles[i] == wanted)

    def _summed(self, now: Layout) -> tuple[int, ...]:
        return tuple(axis for axis in now.partial_axes if self.target.roles[axis] != PARTIAL)

    def _open_dims(self, now: Layout) -> list[int]:
        """The dims that more axes may split: what is split already is split as in the target."""
        return [
            dim
            for dim, axes in enumerate(now.axes_of)
            if set(axes) <= set(self.target.axes_of[dim])
            and (not axes or self._marginal(dim, axes)[1] == united(now.ranges[dim]))
        ]

    def _table(self, now: Layout, dim: int, more: Sequence[int]) -> Table:
        return self._marginal(dim, tuple(sorted({*now.axes_of[dim], *more})))[0]

    def _united(self, now: Layout, dim: int, gone: Sequence[int]) -> Table:
        """The table without some axes; in the target's own order where it holds the same."""
        kept = tuple(axis for axis in now.axes_of[dim] if axis not in gone)
        table = marginal(now, dim, kept)
        if kept and set(kept) <= set(self.target.axes_of[dim]):
            wanted, as_sets = self._marginal(dim, kept)
            return wanted if as_sets == united(table) else table
        return table

    def _marginal(self, dim: int, axes: tuple[int, ...]) -> tuple[Table, Table]:
        """The target's table of a dim over some of its axes, as stored and as sets."""
        known = self._marginals.get((dim, axes))
        if known is None:
            table = marginal(self.target, dim, axes)
            known = self._marginals[dim, axes] = (table, united(table))
        return known

    def _bytes(self, layout: Layout) -> int:
        return largest_part(layout) * self.itemsize

    def _local(self, now: Layout, there: Layout) -> Priced:
        return Move("local", now, there), self.links.seconds("local", 1, self._bytes(there))

    def _price(self, kind: str, now: Layout, there: Layout, axes: Sequence[int], bytes: int) -> Priced:
        return Move(kind, now, there), carried(self.links, kind, _size(now, axes), bytes)


def carried(links: Links, kind: str, size: int, bytes: int) -> float:
    """Seconds of a collective and of the copying around it: one pass over the buffer of a gather or scatter; with
    all_to_all every piece is packed, and put in place or added at the other end."""
    passes = 2 - 1 / size if kind == "all_to_all" else 1
    return links.seconds(kind, size, bytes) + links.seconds("local", 1, passes * bytes)


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Nonempty subsets, the largest first: among equals the fewest moves are found first."""
    for size in range(len(axes), 0, -1):
        yield from itertools.combinations(axes, size)


def _size(layout: Layout, axes: Sequence[int]) -> int:
    return math.prod(layout.grid.axes[axis].size for axis in axes)

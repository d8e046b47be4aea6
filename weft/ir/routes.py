"""Routes: what goes where when a tensor changes from one Layout to another.

    Route := source device and slot, target device and slot, box of the source part, box of the target part

In: two Layouts of one tensor. Out: the boxes that travel (or stay on their device). Promised: every element of
every target part is covered exactly once for each addend it receives. A partial source is summed, unless the target
is partial too: then each source addend goes to one target share. A whole source enters a partial target in share
(0, ..., 0), with zeros elsewhere. Of several copies of a box a target part takes the one on its own device, else the
one with its own coordinates if the grids are equal, else the copies take turns. Routes are listed in the order of
the addends, so that all copies of a sum add in the same order and agree to the last bit.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.ir.layout import COPY, PARTIAL, Cell, Layout, Part
from weft.ir.ranges import Ranges, overlap, whole
from weft.runtime.layout.transfer import Index

Entries = tuple[int, ...]
"""For each dim a position in its table of range lists."""


class Route(NamedTuple):
    """One box of a source part that becomes, or is added to, a box of a target part."""

    source_device: int
    source_slot: int
    target_device: int
    target_slot: int
    source_index: Index
    target_index: Index


def sums_fiber(source: Layout, target: Layout) -> bool:
    """True if the change is a plain sum along axes of one grid: partial becomes copy, all else stays as it is."""
    changed = {(old, new) for old, new in zip(source.roles, target.roles, strict=False) if old != new}
    return (
        source.grid == target.grid
        and not source.grid.repeats
        and source.ranges == target.ranges
        and changed == {(PARTIAL, COPY)}
    )


@dataclass(frozen=True)
class Routing:
    """The routes of one change of layout, found device by device where the grids allow it.

    >>> from weft.ir.layout import Axis, Grid, copied, even, split
    >>> grid = Grid((Axis("tp", 2),), (0, 1))
    >>> for route in Routing(even((4,), grid, (split(0),)), copied((4,), Grid((), (1,)))).all:
    ...     print(route.source_device, route.source_index, route.target_device, route.target_index)
    0 (((0, 2),),) 1 (((0, 2),),)
    1 (((0, 2),),) 1 (((2, 4),),)
    """

    source: Layout
    target: Layout

    def __post_init__(self) -> None:
        assert self.source.shape == self.target.shape, f"{self.source} and {self.target} are of different tensors"

    @cached_property
    def all(self) -> tuple[Route, ...]:
        """Every route, by target device and slot, then in the order of the addends."""
        return self._ordered((cell, part.cell) for part in self.target.parts() for cell in self._cells_into(part.cell))

    def of(self, device: int) -> tuple[Route, ...]:
        """The routes into or out of one device, in the order of `all`."""
        if not self._regular:
            return self._by_device.get(device, ())
        known = self._memo.get(device)
        if known is None:
            pairs = set()
            for cell in self.target.grid.cells_on.get(device, ()):
                pairs |= {(found, cell) for found in self._cells_into(cell)}
                pairs |= {(cell, found) for found in self._cells_out_of(cell)}
            known = self._memo[device] = self._ordered(pairs)
        return known

    def group(self, device: int) -> tuple[int, ...]:
        """The devices linked to this one by routes, directly or through others: in fiber order where a plain sum runs
        along fibers (so that all of them add in one order), else ascending."""
        known = self._groups.get(device)
        if known is not None:
            return known
        if sums_fiber(self.source, self.target):
            group = self._fiber(device)
        else:
            found, front = {device}, [device]
            while front:
                linked = self._linked(front.pop())
                front.extend(linked - found)
                found |= linked
            group = tuple(sorted(found))
        self._groups.update(dict.fromkeys(group, group))
        return group

    def into(self, device: int) -> tuple[Route, ...]:
        """The routes into one device only, in the order of `all`."""
        cells = self.target.grid.cells_on.get(device, ())
        return self._ordered((found, cell) for cell in cells for found in self._cells_into(cell))

    @cached_property
    def is_local(self) -> bool:
        """True if nothing leaves a device."""
        return all(
            self._from.parts[found].device == device
            for cell, device in zip(self.target.grid.cells, self.target.grid.devices, strict=True)
            for found in self._cells_into(cell)
        )

    @cached_property
    def _memo(self) -> dict[int, tuple[Route, ...]]:
        return {}

    @cached_property
    def _groups(self) -> dict[int, tuple[int, ...]]:
        return {}

    @cached_property
    def _regular(self) -> bool:
        """True if the same cell of both layouts is the same device and no other is: routes run along fibers."""
        return self.source.grid == self.target.grid and not self.source.grid.repeats

    @cached_property
    def _by_device(self) -> dict[int, tuple[Route, ...]]:
        found: dict[int, list[Route]] = {}
        for route in self.all:
            for device in {route.source_device, route.target_device}:
                found.setdefault(device, []).append(route)
        return {device: tuple(items) for device, items in found.items()}

    def _linked(self, device: int) -> set[int]:
        if not self._regular:
            return {end for route in self.of(device) for end in (route.source_device, route.target_device)}
        parts = self._from.parts
        return {
            parts[found].device
            for cell in self.target.grid.cells_on.get(device, ())
            for found in itertools.chain(self._cells_into(cell), self._cells_out_of(cell))
        }

    def _fiber(self, device: int) -> tuple[int, ...]:
        grid = self.source.grid
        summed = [i for i, role in enumerate(self.source.roles) if role != self.target.roles[i]]
        cells = grid.cells_on.get(device, ())
        coordinates = [
            [range(grid.axes[i].size) if i in summed else (at,) for i, at in enumerate(cell)] for cell in cells
        ]
        return tuple(grid.device(cell) for choice in coordinates for cell in itertools.product(*choice)) or (device,)

    def _ordered(self, pairs: Iterable[tuple[Cell, Cell]]) -> tuple[Route, ...]:
        sources, targets = self._from.parts, self._to.parts
        found = []
        for source_cell, target_cell in pairs:
            source, target = sources[source_cell], targets[target_cell]
            key = (target.device, target.slot, source.share, source.device, source.slot)
            found.append((key, source_cell, target_cell))
        return tuple(self._route(source_cell, target_cell) for _, source_cell, target_cell in sorted(found))

    def _route(self, source_cell: Cell, target_cell: Cell) -> Route:
        known = self._routes_memo.get((source_cell, target_cell))
        if known is None:
            source, target = self._from.parts[source_cell], self._to.parts[target_cell]
            ends = zip(self._from.entries[source_cell], self._to.entries[target_cell], strict=True)
            boxes = [crossing.index(j, k) for crossing, (j, k) in zip(self._crossings, ends, strict=True)]
            known = self._routes_memo[source_cell, target_cell] = Route(
                source.device,
                source.slot,
                target.device,
                target.slot,
                tuple([box[0] for box in boxes]),
                tuple([box[1] for box in boxes]),
            )
        return known

    @cached_property
    def _routes_memo(self) -> dict[tuple[Cell, Cell], Route]:
        return {}

    @cached_property
    def _from(self) -> _Side:
        return _Side(self.source)

    @cached_property
    def _to(self) -> _Side:
        return _Side(self.target)

    # Which cells are linked.

    @cached_property
    def _crossings(self) -> tuple[_Crossing, ...]:
        return tuple(
            _Crossing(_table(self.source, dim), _table(self.target, dim)) for dim in range(len(self.source.shape))
        )

    @cached_property
    def _assigned(self) -> dict[Cell, Cell]:
        """For each addend of the source the share of the target that takes it."""
        return assign(self.source, self.target)

    @cached_property
    def _taken(self) -> dict[Cell, tuple[Cell, ...]]:
        found: dict[Cell, list[Cell]] = {}
        for share, taker in self._assigned.items():
            found.setdefault(taker, []).append(share)
        return {taker: tuple(shares) for taker, shares in found.items()}

    def _cells_into(self, cell: Cell) -> Iterator[Cell]:
        """The source cells that a target cell draws from."""
        shares = self._taken.get(self._to.parts[cell].share, ())
        entries = self._to.entries[cell]
        choices = [crossing.sources_of[k] for crossing, k in zip(self._crossings, entries, strict=True)]
        for share in shares:
            for found in itertools.product(*choices):
                yield self._choose(cell, share, found)

    def _cells_out_of(self, cell: Cell) -> Iterator[Cell]:
        """The target cells that draw from a source cell. Only where `_regular`: both agree on the copied axes."""
        fixed = {axis: cell[axis] for axis in self._from.copies}
        for found in self._drawers(self._from.parts[cell].share, self._from.entries[cell], fixed):
            if all(found[axis] == at for axis, at in fixed.items()):
                yield found

    def _drawers(self, share: Cell, entries: Entries, fixed: dict[int, int]) -> Iterator[Cell]:
        """The target cells that need a box of an addend, whichever copy they take; `fixed` spares needless ones."""
        target = self.target
        options = [
            _at(target, dim, crossing.targets_of[j], fixed)
            for dim, (crossing, j) in enumerate(zip(self._crossings, entries, strict=True))
        ]
        copies = [(fixed[a],) if a in fixed else range(target.grid.axes[a].size) for a in self._to.copies]
        for found in itertools.product(*options):
            for at in itertools.product(*copies):
                yield self._to.cell(found, self._assigned[share], at)

    def _choose(self, cell: Cell, share: Cell, entries: Entries) -> Cell:
        """Which of the copies of a box a target cell takes."""
        axes = self._from.copies
        if not axes:
            return self._from.cell(entries, share, ())
        same = self.source.grid == self.target.grid
        if same:
            straight = self._from.cell(entries, share, tuple(cell[axis] for axis in axes))
            if self._regular or straight == cell:
                return straight
        near = self._held.get((self._to.parts[cell].device, share, entries))
        if near is not None:
            return near
        if same:
            return straight
        turns = self._turns(share, entries)
        options = list(itertools.product(*(range(self.source.grid.axes[axis].size) for axis in axes)))
        return self._from.cell(entries, share, options[turns[cell] % len(options)])

    @cached_property
    def _held(self) -> dict[tuple[int, Cell, Entries], Cell]:
        held: dict[tuple[int, Cell, Entries], Cell] = {}
        for part in self.source.parts():
            held.setdefault((part.device, part.share, self._from.entries[part.cell]), part.cell)
        return held

    def _turns(self, share: Cell, entries: Entries) -> dict[Cell, int]:
        known = self._turns_memo.get((share, entries))
        if known is None:
            far = (
                cell
                for cell in sorted(self._drawers(share, entries, {}))
                if (self._to.parts[cell].device, share, entries) not in self._held
            )
            known = self._turns_memo[share, entries] = {cell: turn for turn, cell in enumerate(far)}
        return known

    @cached_property
    def _turns_memo(self) -> dict[tuple[Cell, Entries], dict[Cell, int]]:
        return {}


def assign(source: Layout, target: Layout) -> dict[Cell, Cell]:
    """For each addend of the source the share of the target it goes to: its own coordinates where one grid has the
    axis partial in both, else a share on the same devices, else in turn."""
    shares = list(itertools.product(*(range(source.grid.axes[axis].size) for axis in source.partial_axes)))
    if not target.is_partial:
        return dict.fromkeys(shares, ())
    if not source.is_partial:
        return {(): (0,) * len(target.partial_axes)}
    kept = set(source.partial_axes) & set(target.partial_axes) if source.grid == target.grid else set()
    pairs = [(source.partial_axes.index(axis), target.partial_axes.index(axis)) for axis in sorted(kept)]
    if len(pairs) == len(target.partial_axes):
        order = sorted(pairs, key=lambda pair: pair[1])
        return {share: tuple(share[i] for i, _ in order) for share in shares}
    near = _common_devices(source, target)
    takers = list(itertools.product(*(range(target.grid.axes[axis].size) for axis in target.partial_axes)))
    loads = dict.fromkeys(takers, 0)
    assigned: dict[Cell, Cell] = {}
    for number, share in enumerate(shares):
        ranked = [
            (-devices, loads[taker], taker)
            for taker, devices in near.get(share, {}).items()
            if all(share[i] == taker[k] for i, k in pairs)
        ]
        assigned[share] = min(ranked)[2] if ranked else takers[number % len(takers)]
        loads[assigned[share]] += 1
    return assigned


def _common_devices(source: Layout, target: Layout) -> dict[Cell, dict[Cell, int]]:
    """How many devices each source share has in common with each target share."""
    found: dict[Cell, dict[Cell, int]] = {}
    for device in source.grid.cells_on:
        ours = {part.share for part in source.parts_on(device)}
        theirs = {part.share for part in target.parts_on(device)}
        for share, taker in itertools.product(ours, theirs):
            counts = found.setdefault(share, {})
            counts[taker] = counts.get(taker, 0) + 1
    return found


def _at(layout: Layout, dim: int, entries: list[int], fixed: dict[int, int]) -> list[int]:
    """The entries of a dim's table at fixed coordinates, where all of its axes are fixed; else all of them."""
    axes = layout.axes_of[dim]
    if not axes or not all(axis in fixed for axis in axes):
        return entries
    flat = layout.grid.position(axes, fixed)
    return [flat] if flat in entries else []


def _table(layout: Layout, dim: int) -> tuple[Ranges, ...]:
    table = layout.ranges[dim]
    return (whole(layout.shape[dim]),) if table is None else table


class _Side:
    """One of the two layouts, cell by cell."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.parts: dict[Cell, Part] = {part.cell: part for part in layout.parts()}
        self.entries: dict[Cell, Entries] = {
            cell: tuple(layout.grid.position(axes, cell) for axes in layout.axes_of) for cell in layout.grid.cells
        }
        self.copies = tuple(i for i, role in enumerate(layout.roles) if role == COPY)

    def cell(self, entries: Entries, share: Cell, at: Cell) -> Cell:
        """The cell with these positions in the range tables, this share and these coordinates on the copied axes."""
        layout, cell = self._layout, [0] * len(self._layout.roles)
        for axes, entry in zip(layout.axes_of, entries, strict=True):
            rest = entry
            for axis in reversed(axes):
                rest, cell[axis] = divmod(rest, layout.grid.axes[axis].size)
        for axis, coordinate in zip((*layout.partial_axes, *self.copies), (*share, *at), strict=True):
            cell[axis] = coordinate
        return tuple(cell)


class _Crossing:
    """Where the range lists of two tables of one dim meet."""

    def __init__(self, source: tuple[Ranges, ...], target: tuple[Ranges, ...]) -> None:
        self._source, self._target = source, target
        self._memo: dict[tuple[int, int], tuple[Ranges, Ranges]] = {}
        pieces = sorted((start, stop, j) for j, ranges in enumerate(source) for start, stop in ranges)
        stops = [stop for _, stop, _ in pieces]
        self.sources_of: list[list[int]] = []
        self.targets_of: list[list[int]] = [[] for _ in source]
        for k, ranges in enumerate(target):
            met: set[int] = set()
            for start, stop in ranges:
                for piece in itertools.islice(pieces, bisect.bisect_right(stops, start), None):
                    if piece[0] >= stop:
                        break
                    met.add(piece[2])
            self.sources_of.append(sorted(met))
            for j in self.sources_of[k]:
                self.targets_of[j].append(k)

    def index(self, j: int, k: int) -> tuple[Ranges, Ranges]:
        """The common indices of source list j and target list k, as positions in each, in the same order."""
        known = self._memo.get((j, k))
        if known is None:
            segments = overlap(self._source[j], self._target[k])
            known = self._memo[j, k] = (
                tuple((s.source, s.source + s.length) for s in segments),
                tuple((s.target, s.target + s.length) for s in segments),
            )
        return known

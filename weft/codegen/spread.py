"""Spread: layouts in terms of the one grid that a program speaks of.

In: a Program. Out: the grid whose axes the text names (`main_grid`), the ranks that run the same text (`teams`), and
for every Layout which of those axes cut, copy or add along each dim, or None where a layout does not follow them (other
devices, another order): its numbers then stand in tables by rank. Also: how a dim's ranges are said (`describe`).
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from weft.ir.layout import PARTIAL, Grid, Layout
from weft.ir.program import Compute, Program, walk
from weft.ir.ranges import Ranges, count
from weft.runtime.layout.cuts import Cut, Place

GridOf = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Spread:
    """A Layout over the axes of the main grid."""

    dims: tuple[tuple[str, ...], ...]
    """For each dim the axes that cut it, outer first."""
    partial: tuple[str, ...]


def main_grid(program: Program) -> GridOf:
    """The grid that most ops lie on, if it has every device once, in order; else one axis over all devices."""
    every = tuple(range(program.devices))
    votes: Counter[GridOf] = Counter()
    for step in walk(program.steps):
        if isinstance(step, Compute) and step.layout.grid.devices == every:
            axes = tuple((axis.name, axis.size) for axis in step.layout.grid.axes)
            names = [name for name, _ in axes]
            if axes and len(set(names)) == len(names):
                votes[axes] += len(axes) > 0
    if program.devices == 1:
        return ()
    return _finest(votes.most_common(1)[0][0] if votes else (("all", program.devices),), program)


def _finest(grid: GridOf, program: Program) -> GridOf:
    """The grid with an axis as several, where parameters are stored in groups of its cells."""
    every, sizes = tuple(range(program.devices)), [size for _, size in grid]
    votes: Counter[GridOf] = Counter()
    for layout in program.stored.values():
        axes = tuple((axis.name, axis.size) for axis in layout.grid.axes)
        points = set(itertools.accumulate((size for _, size in axes), operator.mul))
        if layout.grid.devices == every and points > set(itertools.accumulate(sizes, operator.mul)):
            votes[axes] += 1
    return votes.most_common(1)[0][0] if votes else grid


def teams(program: Program) -> list[tuple[int, ...]]:
    """Ranks grouped by how many cells they have in each grid of the program: they take part in the same steps."""
    grids: dict[Grid, None] = {}
    for value in program.values.values():
        grids[value.layout.grid] = None
    for layout in program.stored.values():
        grids[layout.grid] = None
    for step in walk(program.steps):
        if isinstance(step, Compute):
            grids[step.layout.grid] = None
    counts = [{rank: len(cells) for rank, cells in grid.cells_on.items()} for grid in grids]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(program.devices):
        found.setdefault(tuple(one.get(rank, 0) for one in counts), []).append(rank)
    return list(map(tuple, found.values()))


class Spreads:
    """Layouts over the axes of the main grid, worked out once."""

    def __init__(self, grid: GridOf, devices: int) -> None:
        self.grid, self.devices = grid, devices
        self.places = [Place(grid, rank) for rank in range(devices)]
        self.of = cache(self._spread)
        """The layout over the main grid's axes; None if it does not follow them."""
        self.axes = cache(self._match)
        """For each axis of a grid the main grid's axes that are the same; None for the whole if devices differ."""

    def _spread(self, layout: Layout) -> Spread | None:
        axes = self.axes(layout.grid)
        if axes is None:
            return None
        used = [i for i, role in enumerate(layout.roles) if role.kind != "copy" and layout.grid.axes[i].size > 1]
        if any(axes[i] is None for i in used):
            return None
        dims = tuple(tuple(name for i in cutting if i in used for name in axes[i] or ()) for cutting in layout.axes_of)
        partial = tuple(name for i in used if layout.roles[i] == PARTIAL for name in axes[i] or ())
        return Spread(dims, partial)

    def _match(self, grid: Grid) -> tuple[tuple[str, ...] | None, ...] | None:
        if grid.repeats or len(grid.devices) != self.devices:
            return None
        cells = dict(zip(grid.devices, grid.cells, strict=True))
        found: list[tuple[str, ...] | None] = []
        for i, axis in enumerate(grid.axes):
            options = [run for run in self._runs() if self.places[0].count(run) == axis.size]
            options.sort(key=(axis.name,).__ne__)
            same = (run for run in options if all(self.places[d].at(run) == cell[i] for d, cell in cells.items()))
            found.append(next(same, None))
        return tuple(found)

    def describe(self, table: Sequence[Ranges], size: int, axes: tuple[str, ...]) -> Cut | None:
        """How a dim of that size is cut along axes of the main grid; None if no words fit."""
        return describe(table, size, axes, tuple(self.places[0].sizes[axis] for axis in axes))

    def _runs(self) -> Iterator[tuple[str, ...]]:
        names = [name for name, _ in self.grid]
        for start, stop in itertools.combinations(range(len(names) + 1), 2):
            yield tuple(names[start:stop])


def describe(table: Sequence[Ranges], size: int, axes: tuple[str, ...], counts: tuple[int, ...]) -> Cut | None:
    """How a dim of that size is cut along axes so that `table` lists its parts; None if no words fit."""
    name = axes[0] if len(axes) == 1 else axes
    for option in _options(table, size, name):
        groups = option.groups if isinstance(option.groups, tuple) else (0,) * option.groups
        if isinstance(option.groups, int) and size % max(len(groups), 1):
            continue
        if option.table(size, counts) == tuple(table):
            return option
    return None


def _options(table: Sequence[Ranges], size: int, axes: str | tuple[str, ...]) -> Iterator[Cut]:
    yield Cut(axes)
    number = max((len(ranges) for ranges in table), default=1)
    if number == 1:
        total = sum(map(count, table))
        for units in range(total - 1, 0, -1):
            if total % units == 0:
                yield Cut(axes, units=units)
        if total == size:
            yield Cut(axes, sizes=tuple(map(count, table)))
        return
    yield Cut(axes, groups=number)
    full = [ranges for ranges in table if len(ranges) == number]
    blocks = tuple(sum(stop - start for start, stop in (r[j] for r in full)) for j in range(number))
    if sum(blocks) == size:
        smallest = min(blocks)
        for units in range(smallest, 0, -1):
            if all(block % units == 0 for block in blocks):
                same = len(set(blocks)) == 1
                yield Cut(axes, groups=number if same else blocks, units=units)

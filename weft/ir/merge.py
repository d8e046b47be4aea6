"""Merging cells that share a device: what a device holds in all of its cells together.

In: a Layout whose devices may repeat. Out: the Layout with one cell per device that holds the same (splits joined,
addends summed, copies once), or None where a device's cells do not form a box of the grid.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from weft.ir.layout import Axis, Cell, Grid, Layout
from weft.ir.ranges import Ranges, union

Groups = tuple[tuple[int, ...], ...]
"""Coordinates of an axis that stand together on one device, by first coordinate."""


@dataclass(frozen=True)
class Merge:
    """How the cells of a grid fall together: for each axis the coordinates that share a device."""

    grid: Grid
    groups: tuple[Groups, ...]
    merged: Grid

    def layout(self, layout: Layout) -> Layout:
        """The same tensor with one cell per device."""
        kept = self.kept
        roles = tuple(layout.roles[axis] for axis in kept)
        return Layout(
            layout.shape, self.merged, roles, tuple(self._table(layout, dim) for dim in range(len(layout.shape)))
        )

    @property
    def kept(self) -> tuple[int, ...]:
        """Positions of the axes that remain: those with more than one group."""
        return tuple(i for i, groups in enumerate(self.groups) if len(groups) > 1 or self.grid.axes[i].size == 1)

    @property
    def shrunk(self) -> frozenset[int]:
        """Positions of the axes along which cells fall together."""
        return frozenset(i for i, groups in enumerate(self.groups) if len(groups) < self.grid.axes[i].size)

    def first(self, cell: Cell, axes: tuple[int, ...]) -> bool:
        """True if the cell comes first in its group along all of these axes."""
        return all(any(group[0] == cell[axis] for group in self.groups[axis]) for axis in axes)

    def _table(self, layout: Layout, dim: int) -> tuple[Ranges, ...] | None:
        axes = layout.axes_of[dim]
        left = [axis for axis in axes if axis in self.kept]
        if not left:
            return None
        rows = []
        for chosen in itertools.product(*(self.groups[axis] for axis in left)):
            groups = dict(zip(left, chosen, strict=True))
            coordinates = itertools.product(
                *(groups.get(axis, tuple(range(self.grid.axes[axis].size))) for axis in axes)
            )
            cells = (_cell(layout.grid, dict(zip(axes, point, strict=True))) for point in coordinates)
            rows.append(union(layout.ranges_at(cell, dim) for cell in cells))
        return tuple(rows)


def _cell(grid: Grid, coordinates: dict[int, int]) -> Cell:
    return tuple(coordinates.get(axis, 0) for axis in range(len(grid.axes)))


def merge(grid: Grid) -> Merge | None:
    """How the cells of a grid fall together, or None if they do not form boxes."""
    groups = []
    for index in range(len(grid.axes)):
        found = _groups(grid, index)
        if found is None:
            return None
        groups.append(found)
    result = Merge(grid, tuple(groups), grid)
    axes = tuple(Axis(grid.axes[i].name, len(groups[i])) for i in result.kept)
    devices = []
    for chosen in itertools.product(*(groups[i] for i in result.kept)):
        cell = _cell(grid, {axis: group[0] for axis, group in zip(result.kept, chosen, strict=True)})
        devices.append(grid.device(cell))
    if len(set(devices)) < len(devices):
        return None
    return Merge(grid, tuple(groups), Grid(axes, tuple(devices)))


def _groups(grid: Grid, index: int) -> Groups | None:
    """Coordinates of one axis grouped by device, if every fiber groups them alike."""
    size = grid.axes[index].size
    patterns = set()
    for cell in grid.cells:
        if cell[index] == 0:
            fiber = [grid.device((*cell[:index], at, *cell[index + 1 :])) for at in range(size)]
            by_device: dict[int, list[int]] = {}
            for at, device in enumerate(fiber):
                by_device.setdefault(device, []).append(at)
            patterns.add(tuple(map(tuple, by_device.values())))
    return patterns.pop() if len(patterns) == 1 else None

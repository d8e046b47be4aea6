"""One grid for two layouts.

In: the Layouts a tensor comes from and goes to. Out: both written over one grid, one cell per device, each axis with
one role in each of them, where there is such a grid. Promised: the rewritten layouts hold the same parts on the same
devices (`same_parts`), after a local step where a device stood in several cells.

A grid's axes may be permuted, merged, or split into factors, and coordinates on an axis may be renamed, for range
tables say explicitly what each coordinate holds. So a layout fits a grid exactly when along each axis of the grid
one thing changes: the ranges of one dim, or the share of the sum, or nothing but the copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from weft.ir.layout import COPY, Axis, Cell, Grid, Layout, Role, split
from weft.ir.ranges import Ranges, union

MOST_AXES = 4
"""Grids with more axes are merged by role first: the search tries subsets of axes."""

MOST_ORDERS = 48
"""Orders of prime factors tried; only grids with several odd axes have more."""


def same_parts(a: Layout, b: Layout) -> bool:
    """True if every device holds, slot by slot, the same ranges and corresponding shares in both."""
    if a == b:
        return True
    if a.grid == b.grid and min((2, *a.shape, *a.grid.sizes)) > 1:
        # on one grid whose axes all tell cells apart, other roles or ranges are other parts
        return False
    if a.shape != b.shape or a.grid.cells_on.keys() != b.grid.cells_on.keys():
        return False
    there: dict[Cell, Cell] = {}
    back: dict[Cell, Cell] = {}
    for device in a.grid.cells_on:
        ours, theirs = a.parts_on(device), b.parts_on(device)
        if len(ours) != len(theirs):
            return False
        for x, y in zip(ours, theirs, strict=True):
            if x.ranges != y.ranges:
                return False
            if there.setdefault(x.share, y.share) != y.share or back.setdefault(y.share, x.share) != x.share:
                return False
    return True


def marginal(layout: Layout, dim: int, keep: Sequence[int]) -> tuple[Ranges, ...] | None:
    """The range table of a dim over some of the axes that split it, the others united."""
    axes, table = layout.axes_of[dim], layout.ranges[dim]
    if table is None or not keep:
        return None
    if len(keep) == len(axes):
        return table
    united: dict[Cell, list[Ranges]] = {}
    cells = itertools.product(*(range(layout.grid.axes[axis].size) for axis in axes))
    for cell, ranges in zip(cells, table, strict=True):
        united.setdefault(tuple(at for axis, at in zip(axes, cell, strict=True) if axis in keep), []).append(ranges)
    return tuple(lists[0] if len(lists) == 1 else union(lists) for _, lists in sorted(united.items()))


def coalesce(layout: Layout) -> Layout:
    """The layout without axes of size 1 and axes along which the device stays the same: what a device's cells hold
    along those is held as one part. Reached from `layout`, and back, by local steps only."""
    gone = [axis for axis in range(len(layout.roles)) if _stays(layout.grid, axis)]
    if not gone:
        return layout
    kept = [axis for axis in range(len(layout.roles)) if axis not in gone]
    first = [cell for cell in layout.grid.cells if not any(cell[axis] for axis in gone)]
    grid = Grid(tuple(layout.grid.axes[axis] for axis in kept), tuple(layout.grid.device(cell) for cell in first))
    tables = tuple(
        marginal(layout, dim, [axis for axis in axes if axis in kept]) for dim, axes in enumerate(layout.axes_of)
    )
    return Layout(layout.shape, grid, tuple(layout.roles[axis] for axis in kept), tables)


def _stays(grid: Grid, axis: int) -> bool:
    if grid.axes[axis].size == 1:
        return True
    inner = math.prod(grid.sizes[axis + 1 :])
    block = inner * grid.sizes[axis]
    return all(device == grid.devices[i - i % block + i % inner] for i, device in enumerate(grid.devices))


def common(source: Layout, target: Layout) -> tuple[Layout, Layout] | None:
    """Both layouts over one grid, or None if no grid that was tried fits both. Neither may repeat a device."""
    if source.grid.cells_on.keys() != target.grid.cells_on.keys() or source.grid.repeats or target.grid.repeats:
        return None
    for grid in (target.grid, source.grid):
        pair = _on(grid, source, target)
        if pair:
            return pair if len(grid.axes) <= MOST_AXES else _merged(*pair)
    for grid in itertools.chain(factored(source.grid), factored(target.grid)):
        pair = _on(grid, source, target)
        if pair:
            return _merged(*pair)
    return None


def _on(grid: Grid, source: Layout, target: Layout) -> tuple[Layout, Layout] | None:
    first, second = express(source, grid), express(target, grid)
    return (first, second) if first and second else None


def express(layout: Layout, grid: Grid) -> Layout | None:
    """The same parts over another grid of the same devices, or None if an axis of it would need two roles."""
    if layout.grid == grid:
        return layout
    cell_of = {device: cells[0] for device, cells in layout.grid.cells_on.items()}
    roles = []
    for axis in range(len(grid.axes)):
        role = _role_along(layout, grid, axis, cell_of)
        if role is None:
            return None
        roles.append(role)
    tables: list[tuple[Ranges, ...] | None] = []
    for dim in range(len(layout.shape)):
        axes = [range(axis.size) if role == split(dim) else (0,) for axis, role in zip(grid.axes, roles, strict=True)]
        cells = itertools.product(*axes)
        cut = split(dim) in roles
        tables.append(tuple(layout.ranges_at(cell_of[grid.device(c)], dim) for c in cells) if cut else None)
    return Layout(layout.shape, grid, tuple(roles), tuple(tables))


def _role_along(layout: Layout, grid: Grid, axis: int, cell_of: dict[int, Cell]) -> Role | None:
    """The one role of the layout's own axes that a step along this axis of another grid moves on, if it is one."""
    inner = math.prod(grid.sizes[axis + 1 :])
    block = inner * grid.sizes[axis]
    found: set[Role] = set()
    for i, device in enumerate(grid.devices):
        here, first = cell_of[device], cell_of[grid.devices[i - i % block + i % inner]]
        found |= {role for role, a, b in zip(layout.roles, here, first, strict=True) if a != b}
        if len(found) > 1:
            return None
    return found.pop() if found else COPY


def factored(grid: Grid) -> Iterator[Grid]:
    """The grid with every axis split into prime factors, in every order of the factors."""
    orders = [sorted(set(itertools.permutations(primes(axis.size)))) for axis in grid.axes]
    for choice in itertools.islice(itertools.product(*orders), MOST_ORDERS):
        axes = [
            Axis(axis.name if len(factors) == 1 else f"{axis.name}.{number}", factor)
            for axis, factors in zip(grid.axes, choice, strict=True)
            for number, factor in enumerate(factors)
        ]
        yield Grid(tuple(axes), grid.devices)


def primes(number: int) -> tuple[int, ...]:
    """Prime factors, ascending.

    >>> primes(12)
    (2, 2, 3)
    """
    found, factor = [], 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            found.append(factor)
            number //= factor
    return tuple(found)


def _merged(source: Layout, target: Layout) -> tuple[Layout, Layout] | None:
    """Axes that have the same role in both layouts become one."""
    grid = source.grid
    classes: dict[tuple[Role, Role], list[int]] = {}
    for axis, pair in enumerate(zip(source.roles, target.roles, strict=True)):
        classes.setdefault(pair, []).append(axis)
    order = [axis for axes in classes.values() for axis in axes]
    spans = [range(grid.axes[axis].size) for axis in order]
    devices = []
    for choice in itertools.product(*spans):
        at = dict(zip(order, choice, strict=True))
        devices.append(grid.device(tuple(at[axis] for axis in range(len(grid.axes)))))
    axes = [
        Axis("+".join(grid.axes[axis].name for axis in group), math.prod(grid.axes[axis].size for axis in group))
        for group in classes.values()
    ]
    return _on(Grid(tuple(axes), tuple(devices)), source, target)


def united(table: tuple[Ranges, ...] | None) -> tuple[Ranges, ...] | None:
    """A range table as sets: each entry ascending."""
    return None if table is None else tuple(union([ranges]) for ranges in table)

"""Layout: how one tensor lies over devices.

    Layout := shape, Grid, a Role per axis, Ranges per split dim
    Grid   := Axis (name, size) ..., a device for each cell (row-major; devices may repeat)
    Role   := split(dim) | copy | partial

Along a `split` axis cells hold disjoint ranges of one dim, along a `copy` axis the same values, along a
`partial` axis addends: the tensor is their sum. Axes that split one dim nest in axis order: `ranges[dim]` lists
the ranges for every combination of coordinates on those axes, row-major. Promised: the ranges of a split dim
are disjoint and cover it (`verify_layout`), so that every element has exactly one place per copy and addend.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from weft.errors import LayoutError
from weft.ir.ranges import Ranges, count, disjoint, overlap, text, union, whole

Cell = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """One direction of a grid."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


@dataclass(frozen=True)
class Role:
    """What an axis does to a tensor: `kind` is split, copy or partial; `dim` only for split."""

    kind: str
    dim: int = -1

    def __str__(self) -> str:
        return f"split({self.dim})" if self.kind == "split" else self.kind


COPY = Role("copy")
PARTIAL = Role("partial")


@cache
def split(dim: int) -> Role:
    """The role of an axis that cuts this dim."""
    return Role("split", dim)


@dataclass(frozen=True)
class Grid:
    """Axes and the device of every cell, row-major.

    >>> print(Grid((Axis("dp", 2), Axis("tp", 2)), (0, 1, 2, 3)))
    [dp=2 tp=2 on 0 1 2 3]
    """

    axes: tuple[Axis, ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        if math.prod(self.sizes) != len(self.devices):
            cells = " x ".join(map(str, self.axes)) or "one cell"
            raise LayoutError(
                f"{len(self.devices)} devices given for a grid of {math.prod(self.sizes)} cells ({cells})",
                remedy="give one device per cell; a device may repeat",
            )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(itertools.product(*map(range, self.sizes)))

    @cached_property
    def cells_on(self) -> dict[int, tuple[Cell, ...]]:
        """The cells of each device, in grid order. Their positions are the device's slots."""
        found: dict[int, list[Cell]] = {}
        for cell, device in zip(self.cells, self.devices, strict=True):
            found.setdefault(device, []).append(cell)
        return {device: tuple(cells) for device, cells in sorted(found.items())}

    @cached_property
    def repeats(self) -> bool:
        """True if a device stands in more than one cell."""
        return len(self.cells_on) < len(self.devices)

    def position(self, axes: Iterable[int], at: Cell | Mapping[int, int]) -> int:
        """Where coordinates stand among all those of some axes, row-major."""
        flat = 0
        for axis in axes:
            flat = flat * self.sizes[axis] + at[axis]
        return flat

    def index(self, cell: Cell) -> int:
        flat = 0
        for coordinate, size in zip(cell, self.sizes, strict=True):
            flat = flat * size + coordinate
        return flat

    def device(self, cell: Cell) -> int:
        return self.devices[self.index(cell)]

    def slot(self, cell: Cell) -> int:
        """Which of its device's cells this is."""
        return self.cells_on[self.device(cell)].index(cell)

    def axis(self, name: str) -> int:
        """Position of the axis of that name, or -1."""
        return next((i for i, axis in enumerate(self.axes) if axis.name == name), -1)

    def __str__(self) -> str:
        return f"[{' '.join(map(str, self.axes))} on {' '.join(map(str, self.devices))}]".replace("[ on", "[on")


@dataclass(frozen=True)
class Part:
    """One cell of a Layout: where it is, which indices it holds, which addend of the sum it is."""

    cell: Cell
    device: int
    slot: int
    ranges: tuple[Ranges, ...]
    share: Cell
    """Coordinates on the partial axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(count(ranges) for ranges in self.ranges)


def positions(held: Part, part: Part) -> tuple[Ranges, ...]:
    """Where a part's indices lie in the local tensor of a larger part, dim by dim."""
    found = []
    for mine, wanted in zip(held.ranges, part.ranges, strict=True):
        found.append(tuple((s.source, s.source + s.length) for s in overlap(mine, wanted)))
    return tuple(found)


@dataclass(frozen=True)
class Layout:
    """How a tensor lies over devices.

    Args:
        shape: of the whole tensor.
        grid: axes and devices.
        roles: one per axis of the grid.
        ranges: for each dim, the ranges at every combination of coordinates of the axes that split it
            (row-major in axis order), or None if no axis does.
    """

    shape: tuple[int, ...]
    grid: Grid
    roles: tuple[Role, ...]
    ranges: tuple[tuple[Ranges, ...] | None, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.grid, self.roles, self.ranges))

    @cached_property
    def axes_of(self) -> tuple[tuple[int, ...], ...]:
        """For each dim the positions of the axes that split it."""
        return tuple(
            tuple(i for i, role in enumerate(self.roles) if role == split(dim)) for dim in range(len(self.shape))
        )

    @cached_property
    def partial_axes(self) -> tuple[int, ...]:
        return tuple(i for i, role in enumerate(self.roles) if role == PARTIAL)

    @property
    def is_partial(self) -> bool:
        return bool(self.partial_axes)

    @cached_property
    def is_even(self) -> bool:
        """True if all cells hold as much of each dim as each other."""
        return all(len(set(map(count, table))) == 1 for table in self.ranges if table is not None)

    def ranges_at(self, cell: Cell, dim: int) -> Ranges:
        """The indices of `dim` that the cell holds."""
        table = self.ranges[dim]
        if table is None:
            return whole(self.shape[dim])
        return table[self.grid.position(self.axes_of[dim], cell)]

    def part(self, cell: Cell) -> Part:
        return self._parts[self.grid.index(cell)]

    @cached_property
    def _parts(self) -> tuple[Part, ...]:
        slots: dict[int, int] = {}
        parts = []
        # whole dims are the same in every cell
        fixed = [whole(size) if table is None else None for size, table in zip(self.shape, self.ranges, strict=True)]
        for cell, device in zip(self.grid.cells, self.grid.devices, strict=True):
            slot = slots.get(device, 0)
            slots[device] = slot + 1
            ranges = tuple(self.ranges_at(cell, dim) if known is None else known for dim, known in enumerate(fixed))
            share = tuple(cell[axis] for axis in self.partial_axes)
            parts.append(Part(cell, device, slot, ranges, share))
        return tuple(parts)

    def parts(self) -> Iterator[Part]:
        """All parts in grid order."""
        return iter(self._parts)

    def parts_on(self, device: int) -> tuple[Part, ...]:
        """The parts of one device, slot by slot; none if it holds nothing."""
        return self._parts_by_device.get(device, ())

    @cached_property
    def _parts_by_device(self) -> dict[int, tuple[Part, ...]]:
        found: dict[int, list[Part]] = {}
        for part in self._parts:
            found.setdefault(part.device, []).append(part)
        return {device: tuple(parts) for device, parts in found.items()}

    def with_role(self, axes: int | Sequence[int], role: Role, tables: dict[int, tuple[Ranges, ...] | None]) -> Layout:
        """The same layout with another role on an axis, or on several, and new range tables for the named dims."""
        changed = (axes,) if isinstance(axes, int) else axes
        roles = tuple(role if i in changed else old for i, old in enumerate(self.roles))
        ranges = tuple(tables.get(dim, table) for dim, table in enumerate(self.ranges))
        return replace(self, roles=roles, ranges=ranges)

    def __str__(self) -> str:
        roles = " ".join(f"{axis.name}:{role}" for axis, role in zip(self.grid.axes, self.roles, strict=True))
        cuts = " ".join(
            f"dim{dim}[{' | '.join(map(text, table))}]" for dim, table in enumerate(self.ranges) if table is not None
        )
        return f"{list(self.shape)} {self.grid} {roles or 'whole'}{' ' if cuts else ''}{cuts}"


def copied(shape: tuple[int, ...], grid: Grid) -> Layout:
    """Every cell holds the whole tensor."""
    return Layout(shape, grid, (COPY,) * len(grid.axes), (None,) * len(shape))


def copied_on(shape: tuple[int, ...], devices: tuple[int, ...]) -> Layout:
    """Every one of these devices holds the whole tensor."""
    return copied(shape, Grid((Axis("all", len(devices)),), devices))


def even(shape: tuple[int, ...], grid: Grid, roles: tuple[Role, ...]) -> Layout:
    """A layout whose split dims are cut as evenly as can be (like `tensor_split`), nested in axis order."""
    tables: list[tuple[Ranges, ...] | None] = []
    for dim, size in enumerate(shape):
        sizes = [axis.size for axis, role in zip(grid.axes, roles, strict=True) if role == split(dim)]
        intervals = [(0, size)]
        for parts in sizes:
            intervals = [piece for interval in intervals for piece in share_out(interval, (1,) * parts)]
        tables.append(tuple(whole_or_part(interval) for interval in intervals) if sizes else None)
    return Layout(shape, grid, roles, tuple(tables))


def whole_or_part(interval: tuple[int, int]) -> Ranges:
    """One interval as a range list; empty if it holds nothing."""
    return (interval,) if interval[0] < interval[1] else ()


def share_out(interval: tuple[int, int], shares: tuple[int, ...]) -> list[tuple[int, int]]:
    """Cut an interval in proportion to shares; equal shares as `tensor_split` does (the first ones longer by one).

    >>> share_out((0, 5), (1, 1, 1))
    [(0, 2), (2, 4), (4, 5)]
    >>> share_out((0, 8), (3, 1))
    [(0, 6), (6, 8)]
    """
    start, stop = interval
    length, total = stop - start, sum(shares)
    if len(set(shares)) == 1:
        base, extra = divmod(length, len(shares))
        sizes = [base + (i < extra) for i in range(len(shares))]
        points = [start, *itertools.accumulate(sizes, initial=start)][1:]
    else:
        points = [start + (c * length * 2 + total) // (2 * total) for c in itertools.accumulate(shares, initial=0)]
    return list(itertools.pairwise(points))


def verify_layout(layout: Layout, name: str = "a layout") -> None:
    """Refuse a layout whose ranges overlap, leave holes or lie outside the tensor."""
    for dim, table in enumerate(layout.ranges):
        axes = layout.axes_of[dim]
        expected = math.prod(layout.grid.axes[axis].size for axis in axes)
        if (table is None) != (not axes) or (table is not None and len(table) != expected):
            raise LayoutError(
                f"{name}: dim {dim} has {table and len(table)} range lists for {expected} cells: {layout}"
            )
        if table is not None and (not disjoint(table) or union(table) != whole(layout.shape[dim])):
            raise LayoutError(
                f"{name}: the parts of dim {dim} overlap or leave holes: {' | '.join(map(text, table))}",
                remedy=f"cover 0:{layout.shape[dim]} exactly once",
            )
    if len(layout.roles) != len(layout.grid.axes):
        raise LayoutError(f"{name}: {len(layout.roles)} roles for {len(layout.grid.axes)} axes")

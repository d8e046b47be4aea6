"""Cuts: which indices of a dim a rank holds, said in terms of the axes of the grid.

    Place := grid (axis, size) ..., rank; coordinates are row-major
    Cut   := axes, how the dim is shared out along them

In: whole sizes and a rank's place. Out: intervals. A plain cut shares a dim out as evenly as can be (the first parts
longer by one), axis by axis from outer to inner. With `groups` the dim is several blocks laid end to end, and a part
takes the same units of each: a fused query-key-value projection cut by heads.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from weft.runtime.layout.indices import Intervals
from weft.runtime.layout.transfer import Index

Axes = str | tuple[str, ...]


class UnknownAxis(LookupError):  # noqa: N818 - says what happened
    """A name that no axis of the grid has."""


@dataclass(frozen=True)
class Place:
    """A rank and its coordinates on the grid.

    >>> Place((("dp", 2), ("tp", 2)), 3).at(("tp",))
    1
    """

    grid: tuple[tuple[str, int], ...]
    rank: int

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return dict(self.grid)

    @cached_property
    def coordinates(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        rest = self.rank
        for name, size in reversed(self.grid):
            rest, found[name] = divmod(rest, size)
        return found

    def at(self, axes: tuple[str, ...]) -> int:
        """The position along some axes together, the last one running fastest."""
        flat = 0
        for axis in axes:
            flat = flat * self.size(axis) + self.coordinates[axis]
        return flat

    def count(self, axes: tuple[str, ...]) -> int:
        """How many positions there are along some axes together."""
        return math.prod(map(self.size, axes))

    def size(self, axis: str) -> int:
        """How many positions there are along one axis."""
        if axis not in self.sizes:
            known = ", ".join(f"{name} of {size}" for name, size in self.grid)
            raise UnknownAxis(f"the grid has no axis {axis!r}; its axes are {known or 'none'}")
        return self.sizes[axis]

    def group(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from this one along these axes only, in order."""
        self.count(axes)  # all are there
        choices = [range(size) if name in axes else (self.coordinates[name],) for name, size in self.grid]
        return tuple(self.rank_at(found) for found in itertools.product(*choices))

    def rank_at(self, coordinates: tuple[int, ...]) -> int:
        flat = 0
        for at, (_, size) in zip(coordinates, self.grid, strict=True):
            flat = flat * size + at
        return flat

    def of(self, rank: int) -> Place:
        """The place of another rank."""
        return Place(self.grid, rank)


def as_axes(axes: Axes) -> tuple[str, ...]:
    """One axis name counts as a tuple of one."""
    return (axes,) if isinstance(axes, str) else tuple(axes)


def axes_text(axes: Axes) -> str:
    """Axes as they are written in a program: one by its name, several as a tuple."""
    names = list(map(json.dumps, as_axes(axes)))
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


@dataclass(frozen=True)
class Cut:
    """How one dim is cut.

    Args:
        axes: that cut it, from outer to inner.
        groups: how many equal blocks the dim consists of, or the sizes of its blocks.
        units: how many indivisible units every block consists of; every index is one if not given.
        sizes: lengths of the parts, where they are not as even as can be.
    """

    axes: Axes
    groups: int | tuple[int, ...] = 1
    units: int | None = None
    sizes: tuple[int, ...] | None = None

    def __str__(self) -> str:
        """As it is written in a program: the axes alone if it is plain.

        >>> print(Cut("tp"), Cut(("dp", "tp"), units=4))
        "tp" Cut(("dp", "tp"), units=4)
        """
        words = [axes_text(self.axes)]
        words += [f"groups={self.groups}"] if self.groups != 1 else []
        words += [f"units={self.units}"] if self.units is not None else []
        words += [f"sizes={self.sizes}"] if self.sizes is not None else []
        return words[0] if len(words) == 1 else f"Cut({', '.join(words)})"

    def ranges(self, size: int, place: Place) -> Intervals:
        """The indices of a dim of that size that a rank holds, in stored order."""
        axes = as_axes(self.axes)
        counts = tuple(map(place.size, axes))
        return self.table(size, counts)[place.at(axes)]

    def table(self, size: int, counts: tuple[int, ...]) -> tuple[Intervals, ...]:
        """The indices of every part.

        >>> Cut("tp", groups=2).table(8, (2,))
        (((0, 2), (4, 6)), ((2, 4), (6, 8)))
        """
        if self.sizes is not None:
            ends = list(itertools.accumulate(self.sizes, initial=0))
            assert ends[-1] == size, f"a dim of {size} cannot be cut into {self.sizes}"
            return tuple(map(_tidy, ([pair] for pair in itertools.pairwise(ends))))
        blocks = self.groups if isinstance(self.groups, tuple) else (size // self.groups,) * self.groups
        assert sum(blocks) == size, f"a dim of {size} does not consist of the groups {blocks}"
        units = max(blocks[0], 1) if self.units is None else self.units
        intervals = [(0, units)]
        for count in counts:
            intervals = [piece for interval in intervals for piece in share_out(interval, count)]
        offsets = list(itertools.accumulate(blocks, initial=0))
        return tuple(
            _tidy(
                [(at + start * (b // units), at + stop * (b // units)) for at, b in zip(offsets, blocks, strict=False)]
            )
            for start, stop in intervals
        )


def share_out(interval: tuple[int, int], count: int) -> list[tuple[int, int]]:
    """Cut an interval as evenly as can be, the first parts longer by one.

    >>> share_out((0, 5), 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    base, extra = divmod(interval[1] - interval[0], count)
    sizes = [base + (i < extra) for i in range(count)]
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=interval[0])))


def _tidy(pairs: list[tuple[int, int]]) -> Intervals:
    out: list[tuple[int, int]] = []
    for start, stop in pairs:
        if start < stop and out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        elif start < stop:
            out.append((start, stop))
    return tuple(out)


Cuts = Mapping[int, Axes | Cut]
"""For each dim that is cut: the axes, or how."""


def as_cut(cut: Axes | Cut) -> Cut:
    """Bare axes are a plain cut."""
    return cut if isinstance(cut, Cut) else Cut(cut)


def whole(shape: tuple[int, ...]) -> Index:
    """The index that takes everything."""
    return tuple(((0, size),) if size else () for size in shape)


def index_at(shape: tuple[int, ...], cuts: Cuts, place: Place) -> Index:
    """What a rank holds of a tensor of that shape."""
    found = list(whole(shape))
    for dim, cut in cuts.items():
        found[dim] = as_cut(cut).ranges(shape[dim], place)
    return tuple(found)

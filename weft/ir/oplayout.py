"""OpLayout: how one op lies over devices: a grid, and for each axis what it does to the op.

    OpLayout := Grid, a Use per axis
    Use      := Cut(name, shares, groups, units) | Copied | Carried(operands)

`Cut` cuts the op along a name of its rule. The name's indices are `groups` laid end to end, each of `units` units;
a cell takes the same units of every group: `groups=(h, h, h), units=heads` cuts a fused query-key-value
projection by heads. Axes that cut one name nest in axis order. `Copied`: every cell runs the op.
`Carried`: the named operands arrive as addends and so leaves the output (the op is linear in them jointly).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from weft.errors import PlanError
from weft.ir.layout import Grid, share_out, whole_or_part
from weft.ir.ranges import Ranges, tidy


@dataclass(frozen=True)
class Cut:
    """Cut along a name of the rule, in proportion to `shares`."""

    name: str
    shares: tuple[int, ...]
    groups: tuple[int, ...]
    units: int

    def __str__(self) -> str:
        parts = f"{len(self.shares)}" if len(set(self.shares)) == 1 else f"{list(self.shares)}"
        shape = "" if self.units == sum(self.groups) else f" of {'+'.join(map(str, self.groups))} in {self.units}"
        return f"cut {self.name} {parts}{shape}"


@dataclass(frozen=True)
class Copied:
    """Every cell runs the op."""

    def __str__(self) -> str:
        return "copy"


@dataclass(frozen=True)
class Carried:
    """The operands (positions among the op's tensor operands) are addends, and so is the output."""

    operands: frozenset[int]

    def __str__(self) -> str:
        return f"carry {','.join(map(str, sorted(self.operands)))}"


Use = Cut | Copied | Carried


@dataclass(frozen=True)
class OpLayout:
    """Where and how an op runs.

    Args:
        grid: its axes and devices.
        uses: one per axis.
        algorithm: name of the algorithm chosen for names that need one; "" for the rule's default.
        recompute: run again in backward instead of keeping intermediate values; ops with the same number
            that stand together are recomputed together.
    """

    grid: Grid
    uses: tuple[Use, ...]
    algorithm: str = field(default="")
    recompute: int | None = None

    def axes_cutting(self, name: str) -> tuple[int, ...]:
        """Positions of the axes that cut a name."""
        return tuple(i for i, use in enumerate(self.uses) if isinstance(use, Cut) and use.name == name)

    def peers(self, name: str, cell: tuple[int, ...]) -> tuple[int, ...]:
        """The devices along the axes that cut a name, from this cell's place."""
        axes = set(self.axes_cutting(name))
        return tuple(
            device
            for other, device in zip(self.grid.cells, self.grid.devices, strict=True)
            if all(other[i] == cell[i] for i in range(len(cell)) if i not in axes)
        )

    @cached_property
    def cut_names(self) -> tuple[str, ...]:
        """The names that some axis cuts, in axis order."""
        return tuple(dict.fromkeys(use.name for use in self.uses if isinstance(use, Cut)))

    def table(self, name: str) -> tuple[Ranges, ...]:
        """The ranges of a name for each combination of coordinates on the axes that cut it, row-major."""
        return self._tables[name]

    @cached_property
    def _tables(self) -> dict[str, tuple[Ranges, ...]]:
        return {name: cut_table([self.uses[i] for i in self.axes_cutting(name)]) for name in self.cut_names}  # type: ignore[misc]

    def __str__(self) -> str:
        uses = " ".join(f"{axis.name}:{use}" for axis, use in zip(self.grid.axes, self.uses, strict=True))
        return f"{self.grid} {uses or 'whole'}"


def cut_table(cuts: list[Cut]) -> tuple[Ranges, ...]:
    """Ranges of one name under nested cuts, for each combination of coordinates.

    >>> cut_table([Cut("n", (1, 1), (4, 4), 4)])
    (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    """
    first = cuts[0]
    if any((cut.groups, cut.units) != (first.groups, first.units) for cut in cuts):
        raise PlanError(
            f"two axes cut {first.name!r} in different units: {', '.join(map(str, cuts))}",
            remedy="give both cuts the same groups and units",
        )
    intervals = [(0, first.units)]
    for cut in cuts:
        intervals = [piece for interval in intervals for piece in share_out(interval, cut.shares)]
    return tuple(_in_groups(first, interval) for interval in intervals)


def _in_groups(cut: Cut, interval: tuple[int, int]) -> Ranges:
    if len(cut.groups) == 1 and cut.groups[0] == cut.units:
        return whole_or_part(interval)
    pairs, offset = [], 0
    for size in cut.groups:
        unit = size // cut.units
        pairs.append((offset + interval[0] * unit, offset + interval[1] * unit))
        offset += size
    return tidy(pairs)


def plain_cut(name: str, extent: int, shares: tuple[int, ...]) -> Cut:
    """A cut of a name into contiguous ranges."""
    return Cut(name, shares, (extent,), extent)

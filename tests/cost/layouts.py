"""Layouts to try: every role on every axis of grids over up to 8 devices, and the odd ones.

Odd: permuted devices, subsets, other devices, repeated devices, uneven and empty parts, several ranges per part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from weft.ir.layout import COPY, PARTIAL, Axis, Grid, Layout, Role, share_out, split, whole_or_part
from weft.ir.oplayout import Cut, cut_table
from weft.ir.ranges import Ranges

SHAPE = (12, 6)
ROLES = (split(0), split(1), COPY, PARTIAL)


def grid(sizes: tuple[int, ...], devices: tuple[int, ...] | None = None) -> Grid:
    axes = tuple(Axis("abc"[i], size) for i, size in enumerate(sizes))
    return Grid(axes, devices or tuple(range(math.prod(sizes))))


def table(size: int, parts: list[int], style: str) -> tuple[Ranges, ...]:
    """Range lists of a dim of that size under nested cuts."""
    if style == "grouped" and size and size % 3 == 0:
        third = size // 3
        return cut_table([Cut("n", (1,) * count, (third,) * 3, third) for count in parts])
    intervals = [(0, size)]
    for count in parts:
        shares = (1,) * count
        if style == "uneven":
            shares = tuple(range(count, 0, -1))
        if style == "empty":
            shares = tuple(int(i in (0, count - 1)) for i in range(count))
        intervals = [piece for interval in intervals for piece in share_out(interval, shares)]
    found = [whole_or_part(interval) for interval in intervals]
    return tuple(reversed(found)) if style == "reversed" else tuple(found)


def layout(on: Grid, roles: tuple[Role, ...], style: str = "even", shape: tuple[int, ...] = SHAPE) -> Layout:
    tables = []
    for dim, size in enumerate(shape):
        parts = [axis.size for axis, role in zip(on.axes, roles, strict=True) if role == split(dim)]
        tables.append(table(size, parts, style) if parts else None)
    return Layout(shape, on, roles, tuple(tables))


def regular() -> Iterator[Layout]:
    """All roles over 8 = 8 = 2x4 = 4x2 = 2x2x2 devices."""
    for sizes in ((8,), (2, 4), (4, 2), (2, 2, 2)):
        for roles in itertools.product(ROLES, repeat=len(sizes)):
            yield layout(grid(sizes), roles)


GRIDS = (
    grid((8,), (7, 6, 5, 4, 3, 2, 1, 0)),
    grid((2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
    grid((2, 2, 2), (0, 4, 2, 6, 1, 5, 3, 7)),
    grid((2, 4), (3, 1, 4, 0, 5, 2, 7, 6)),
    grid((4,), (4, 5, 6, 7)),
    grid((2, 2), (1, 3, 5, 7)),
    grid((2, 3), (5, 4, 3, 2, 1, 0)),
    grid((3, 2), (0, 1, 2, 3, 4, 5)),
    grid((6,)),
    grid((1, 4, 1)),
    grid((2, 4), (0, 0, 0, 0, 1, 1, 1, 1)),
    grid((4, 2), (0, 1, 0, 1, 2, 3, 2, 3)),
    grid((8,), (0, 1, 2, 0, 1, 2, 0, 1)),
    grid((2, 2, 2), (0, 1, 1, 0, 2, 3, 3, 2)),
    grid((2, 2), (8, 9, 10, 11)),
    grid((1,), (3,)),
    grid(()),
)


def odd() -> Iterator[Layout]:
    """All roles over odd grids; all styles of tables over a few."""
    for on in GRIDS:
        for roles in itertools.product(ROLES, repeat=len(on.axes)):
            yield layout(on, roles)
    for style in ("uneven", "empty", "grouped", "reversed"):
        cubes = (grid((2, 2, 2)),) if style in ("uneven", "grouped") else ()
        for on in (grid((8,)), grid((4, 2)), GRIDS[10], *cubes):
            for roles in itertools.product(ROLES, repeat=len(on.axes)):
                if any(role.kind == "split" for role in roles):
                    yield layout(on, roles, style)


def everything() -> list[Layout]:
    return list(dict.fromkeys(itertools.chain(regular(), odd())))

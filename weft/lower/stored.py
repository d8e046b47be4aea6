"""Where parameters live: the layout each is stored in, and hence where its gradient must arrive.

In: the layouts of all uses of each parameter, the plan's `store` lines. Out: a Layout per parameter with one cell
per device. Without a `store` line a parameter lives as it is used; where its uses differ, in the one of these
layouts that moves the fewest bytes forward and backward. A `store` line changes the role of the named axes: stored
split and used as copy is ZeRO-3. What its uses cut along the axis stays as it is used: each device has a part already.
If the line speaks of the optimizer's state alone, what is stored is what the optimizer updates, and the parameter is
kept as it is used: ZeRO-1, and ZeRO-2 if gradients are added up in parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from weft.cost.reshard import Resharder
from weft.errors import PlanError
from weft.ir.graph import Parameter
from weft.ir.layout import COPY, PARTIAL, Axis, Grid, Layout, copied_on, share_out, split, verify_layout, whole_or_part
from weft.ir.merge import merge
from weft.ir.oplayout import Cut
from weft.ir.ranges import Ranges, count, select
from weft.ops.derive import Operand
from weft.plan.lines import Store
from weft.plan.plan import AxisUse


def resting(layout: Layout) -> Layout | None:
    """A layout to store a tensor in that is used so: addends become copies, one cell per device."""
    still = replace(layout, roles=tuple(COPY if role == PARTIAL else role for role in layout.roles))
    if not layout.grid.repeats:
        return still
    merged = merge(layout.grid)
    return None if merged is None else merged.layout(still)


def stored_layout(
    shape: tuple[int, ...], uses: Sequence[Operand], itemsize: int, devices: int, resharder: Resharder
) -> Layout:
    """The cheapest place for a parameter, given how it is used (each with the layout of its gradient)."""
    candidates = [layout for use in uses if (layout := resting(use.layout)) is not None]
    candidates = list(dict.fromkeys(candidates))
    if not candidates:
        return copied_on(shape, tuple(range(devices)))

    def price(layout: Layout) -> float:
        return sum(
            resharder.seconds(layout, use.layout, itemsize) + resharder.seconds(use.grad, layout, itemsize)
            for use in uses
        )

    return min(candidates, key=price)


def apply_store(layout: Layout, store: Store, parameter: Parameter) -> Layout:
    """The stored layout with the roles that `store` asks for on its axes."""
    for one in store.updated:
        layout = _store_axis(layout, one, parameter, store.place)
    verify_layout(layout, parameter.names[0])
    return layout


def held_on(layout: Layout, devices: tuple[int, ...], count: int, parameter: Parameter, place: str) -> Layout:
    """Whole on each of these devices, of so many."""
    if max(devices) >= count:
        raise PlanError(
            f"{parameter.names[0]} is to lie on device {max(devices)}, but the ops that use it have devices 0 to "
            f"{count - 1}",
            place=place,
            remedy="count devices from 0 inside the stage of those ops",
        )
    return copied_on(layout.shape, devices)


def kept(stores: Mapping[str, Store], stored: Mapping[str, Layout]) -> dict[str, bool]:
    """The parameters that are kept as they are used; True if their gradients are too."""
    return {name: not store.reduced for name, store in stores.items() if store.kept and name in stored}


def _store_axis(layout: Layout, one: AxisUse, parameter: Parameter, place: str) -> Layout:
    name = parameter.names[0]
    axis = layout.grid.axis(one.axis)
    if axis < 0:
        layout, axis = _with_axis(layout, one, name, place)
    if layout.grid.axes[axis].size != one.size:
        raise PlanError(
            f"{name} lies over {layout.grid.axes[axis]} where it is used, but is to be stored in {one.size} parts",
            place=place,
            remedy=f"store it in {layout.grid.axes[axis].size} parts along {one.axis!r}, copies counted",
        )
    if layout.roles[axis].kind == "split":
        return layout
    if not isinstance(one.use, Cut):
        return layout
    if one.copies > 1:
        layout, axis = _grouped(layout, axis, one.copies), axis + 1
    dim = int(one.use.name)
    old = layout.ranges[dim] or (((0, layout.shape[dim]),) if layout.shape[dim] else (),)
    return layout.with_role(axis, split(dim), {dim: _nested(layout, axis, dim, old, one.use.shares)})


def _with_axis(layout: Layout, one: AxisUse, name: str, place: str) -> tuple[Layout, int]:
    """If the parameter is a copy on as many devices, those copies can carry the new axis."""
    copies = [i for i, role in enumerate(layout.roles) if role == COPY and layout.grid.axes[i].size == one.size]
    if not copies:
        raise PlanError(
            f"{name} has no {one.size} copies to store in parts along {one.axis!r}: it lies as {layout}",
            place=place,
            remedy="use an axis of the ops that use it",
        )
    axes = tuple(Axis(one.axis, axis.size) if i == copies[0] else axis for i, axis in enumerate(layout.grid.axes))
    return replace(layout, grid=Grid(axes, layout.grid.devices)), copies[0]


def _grouped(layout: Layout, axis: int, groups: int) -> Layout:
    """The layout with an axis of copies as two: groups of cells, and the cells of a group."""
    axes, old = layout.grid.axes, layout.grid.axes[axis]
    two = Axis(f"{old.name}_groups", groups), Axis(f"{old.name}_parts", old.size // groups)
    grid = Grid((*axes[:axis], *two, *axes[axis + 1 :]), layout.grid.devices)
    return Layout(layout.shape, grid, (*layout.roles[:axis], COPY, *layout.roles[axis:]), layout.ranges)


def _nested(
    layout: Layout, axis: int, dim: int, old: tuple[Ranges, ...], shares: tuple[int, ...]
) -> tuple[Ranges, ...]:
    """Cut every range list of a dim further, along one more axis."""
    outer = layout.axes_of[dim]
    cut = [_cut_list(ranges, shares) for ranges in old]
    # of the axes that cut the dim already, those inside of the new one run faster than it
    inner = math.prod(layout.grid.axes[other].size for other in outer if other > axis)
    rows: list[Ranges] = []
    for start in range(0, len(cut), inner):
        for part in range(len(shares)):
            rows.extend(pieces[part] for pieces in cut[start : start + inner])
    return tuple(rows)


def _cut_list(ranges: Ranges, shares: tuple[int, ...]) -> list[Ranges]:
    return [select(ranges, whole_or_part(piece)) for piece in share_out((0, count(ranges)), shares)]

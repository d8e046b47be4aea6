"""Followers: from what the plan says of some ops to a layout for every op.

In: a Plan, the rules. Out: an OpLayout for each op. An op that was told all its axes and devices keeps them. For
every axis that an op was not told about, it follows the producer that divides its work the most: a split dim goes
on as a cut of the name standing there, an addend is carried only where that costs nothing (the op is jointly linear
in all operands that are one and nobody else reads it), everything else is copied. Ops with nobody to follow are
copied over all devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.errors import PlanError
from weft.ir.graph import Op
from weft.ir.layout import Axis, Cell, Grid, Layout
from weft.ir.merge import merge
from weft.ir.oplayout import Carried, Copied, Cut, OpLayout, Use, cut_table
from weft.ir.ranges import Ranges, tidy
from weft.ops.book import RuleBook
from weft.ops.derive import require
from weft.ops.rule import Dim, Rule, dim_ranges
from weft.ops.work import light_ops
from weft.plan.plan import Decision, Plan

REST = "rest"
"""The axis along which ops on all devices are copied if nobody said anything else."""


@dataclass(frozen=True)
class _Lead:
    """A producer that an op could follow: its layout, and through which operand and output they meet."""

    op: Op
    layout: OpLayout
    output: int
    operand: int
    value: Layout
    shared: bool
    """True if other ops read the same tensor, or this one also reads a trained parameter: an addend carried on from
    here would be completed more than once."""


def resolve(plan: Plan, book: RuleBook) -> dict[str, OpLayout]:
    """A layout for every op of the plan's graph.

    A stage is a world of its own: its ops are laid out as if its devices were all there are.
    """
    if not plan.stages:
        return _resolve(plan, book)
    found: dict[str, OpLayout] = {}
    for count in dict.fromkeys(len(stage.devices) for stage in plan.stages.values()):
        members = {name for name, stage in plan.stages.items() if len(stage.devices) == count}
        inside = _resolve(_View(plan, count, members), book)
        found.update((name, _moved(inside[name], plan.stages[name].devices)) for name in members)
    outside = {op.name for op in plan.graph.ops if op.name not in plan.stages}
    every = tuple(range(plan.devices))
    for name in light_ops(plan.graph, book) & outside:
        # whoever reads it makes it for itself
        found[name] = OpLayout(Grid((Axis("all", plan.devices),), every), (Copied(),))
    outside -= found.keys()
    if outside:
        everywhere = _resolve(_View(plan, plan.devices, outside, everywhere=True), book)
        found.update((name, everywhere[name]) for name in outside)
    layouts = {op.name: found[op.name] for op in plan.graph.ops}
    _refuse_idle(plan.devices, layouts)
    return layouts


class _View:
    """A plan as the ops of some stages see it."""

    def __init__(self, plan: Plan, devices: int, members: set[str], *, everywhere: bool = False) -> None:
        self.graph, self.devices, self.everywhere = plan.graph, devices, everywhere
        self.decisions = {name: one for name, one in plan.decisions.items() if name in members}


def _moved(layout: OpLayout, devices: Sequence[int]) -> OpLayout:
    grid = Grid(layout.grid.axes, tuple(devices[device] for device in layout.grid.devices))
    return replace(layout, grid=grid)


def _resolve(plan: Plan | _View, book: RuleBook) -> dict[str, OpLayout]:
    mesh = default_grid(plan)
    layouts: dict[str, OpLayout] = {}
    for op in plan.graph.ops:
        decision = plan.decisions.get(op.name, Decision())
        if decision.devices is not None:
            layout = _told(decision)
        else:
            layout = _follow(op, decision, _leads(op, plan, book, layouts), mesh, book)
        layout = _run_once_per_device(op, layout)
        recompute = op.recompute if decision.recompute is None else decision.recompute
        layout = OpLayout(layout.grid, layout.uses, decision.algorithm, recompute)
        rule = book.rule(op, decision.algorithm)
        for use in layout.uses:
            if isinstance(use, Cut):
                require(op, rule, use)
        _refuse_talking_chunks(op, rule, layout)
        layouts[op.name] = layout
    _refuse_idle(plan.devices, layouts)
    return layouts


def default_grid(plan: Plan | _View) -> Grid:
    """The grid of ops that were not assigned: the axes of the plan over all devices, row-major."""
    axes: dict[str, int] = {}
    for decision in plan.decisions.values():
        if decision.devices is None:
            axes.update((one.axis, one.size) for one in decision.uses)
    if not axes:
        every = tuple(range(plan.devices))
        return Grid((), every) if plan.devices == 1 else Grid((Axis("all", plan.devices),), every)
    cells = math.prod(axes.values())
    grown = axes
    if cells != plan.devices and isinstance(plan, _View) and plan.everywhere and plan.devices % cells == 0:
        # told of some axes only, on the devices of several stages: copies along the rest
        grown = {**axes, REST: plan.devices // cells}
    if math.prod(grown.values()) == plan.devices:
        return Grid(tuple(Axis(name, size) for name, size in grown.items()), tuple(range(plan.devices)))
    placed = _grid_of_placed(plan, axes)
    if placed is not None:
        return placed
    arithmetic = " * ".join(f"{name}={size}" for name, size in axes.items())
    raise PlanError(
        f"the plan's axes make {arithmetic} = {cells} parts, but there are {plan.devices} devices",
        remedy="change the parts or the number of devices, or place the ops with plan.assign",
    )


def _grid_of_placed(plan: Plan | _View, axes: Mapping[str, int]) -> Grid | None:
    """The grid of an op that was placed on all devices and has these axes: the others can lie along it too."""
    for decision in plan.decisions.values():
        if decision.devices is None or set(decision.devices) != set(range(plan.devices)):
            continue
        merged = merge(_told(decision).grid)
        if merged is not None and all(merged.merged.axis(name) >= 0 for name in axes):
            return merged.merged
    return None


def _told(decision: Decision) -> OpLayout:
    axes = tuple(Axis(one.axis, one.size) for one in decision.uses)
    assert decision.devices is not None
    return OpLayout(Grid(axes, decision.devices), tuple(one.use for one in decision.uses))


def _leads(op: Op, plan: Plan | _View, book: RuleBook, layouts: Mapping[str, OpLayout]) -> list[_Lead]:
    """Producers of the op's operands, the one that divides the work most first."""
    found = []
    trained = any(name in plan.graph.parameter_tensors and plan.graph.tensors[name].needs_grad for name in op.inputs)
    for position, name in enumerate(op.inputs):
        producer = plan.graph.producers.get(name)
        if producer is None:
            continue
        layout, output = layouts[producer.name], producer.outputs.index(name)
        value = book.operands(producer, layout).outputs[output].layout
        shared = trained or len({one.name for one in plan.graph.consumers[name]}) > 1
        found.append(_Lead(producer, layout, output, position, value, shared))

    def rank(lead: _Lead) -> tuple[int, int, int]:
        cut = math.prod(
            axis.size for axis, role in zip(lead.value.grid.axes, lead.value.roles, strict=True) if role.kind == "split"
        )
        # constants (masks, positions) are the same everywhere and should lead nobody
        return (int(lead.op.constant), -cut, -math.prod(lead.value.shape))

    return sorted(found, key=rank)


def _follow(op: Op, decision: Decision, leads: list[_Lead], mesh: Grid, book: RuleBook) -> OpLayout:
    own = {one.axis: one.use for one in decision.uses}
    for lead in leads:
        axes = {axis.name: axis.size for axis in lead.layout.grid.axes}
        if all(axes.get(one.axis) == one.size for one in decision.uses):
            uses = _uses(book.rule(op, decision.algorithm), lead, leads, own, book)
            return OpLayout(lead.layout.grid, uses)
    missing = [name for name in own if mesh.axis(name) < 0]
    if missing:
        raise PlanError(
            f"axis {missing[0]!r} of {op.name} is not an axis of the devices {mesh}",
            place=op.place,
            remedy="place the op with plan.assign, or cut all ops along the same axes",
        )
    return OpLayout(mesh, tuple(own.get(axis.name, Copied()) for axis in mesh.axes))


def _uses(rule: Rule, lead: _Lead, leads: list[_Lead], own: Mapping[str, Use], book: RuleBook) -> tuple[Use, ...]:
    """A use for each axis of the lead's grid: the op's own, or the lead's carried over."""
    chosen: list[Use] = []
    taken = [use for use in own.values() if isinstance(use, Cut)]
    for index, axis in enumerate(lead.layout.grid.axes):
        if axis.name in own:
            chosen.append(own[axis.name])
            continue
        use = _carry_over(rule, lead, leads, index, book)
        if isinstance(use, Cut):
            clash = [other for other in taken if other.name == use.name]
            if any((other.groups, other.units) != (use.groups, use.units) for other in clash):
                use = Copied()
            else:
                taken.append(use)
        chosen.append(use)
    return tuple(chosen)


def _carry_over(rule: Rule, lead: _Lead, leads: list[_Lead], axis: int, book: RuleBook) -> Use:
    """What the op does along an axis of the lead's grid so that its operand stays as it is; a copy if nothing can."""
    role = lead.value.roles[axis]
    if role.kind == "partial" and not lead.shared and not _on_one_device(lead.layout.grid, axis):
        partial = {
            other.operand
            for other in leads
            if other.value.grid == lead.value.grid and other.value.roles[axis].kind == "partial"
        }
        for operands in rule.linear:
            if operands == partial:
                return Carried(operands)
    if role.kind == "split":
        use = lead.layout.uses[axis]
        assert isinstance(use, Cut)
        source = book.rule(lead.op, lead.layout.algorithm)
        for cut in translate(
            source, source.outputs[lead.output][role.dim], use, rule, rule.inputs[lead.operand][role.dim]
        ):
            return cut
    return Copied()


def _on_one_device(grid: Grid, axis: int) -> bool:
    """True if some cells along an axis share a device: adding up there is free, and chunks should be short-lived."""
    merged = merge(grid) if grid.repeats else None
    return merged is not None and axis in merged.shrunk


def translate(source: Rule, source_dim: Dim, cut: Cut, target: Rule, target_dim: Dim) -> Iterator[Cut]:
    """Cuts of the target's names that leave a dim exactly as a cut of the source's name did.

    Where both rules describe the same dim of one tensor, possibly in other factors.
    """
    first_unit = Cut(cut.name, (1,) * cut.units, cut.groups, cut.units)
    unit = dim_ranges(source_dim, {cut.name: cut_table([first_unit])[0]}, source.sizes)
    wanted = [dim_ranges(source_dim, {cut.name: ranges}, source.sizes) for ranges in cut_table([cut])]
    for name in sorted(target_dim.names - target.frozen):
        indices = project(target_dim, name, unit, target.sizes)
        groups = tuple((stop - start) * cut.units for start, stop in indices)
        if sum(groups) != target.sizes[name]:
            continue
        candidate = Cut(name, cut.shares, groups, cut.units)
        made = [dim_ranges(target_dim, {name: ranges}, target.sizes) for ranges in cut_table([candidate])]
        if made == wanted:
            yield candidate


def project(one: Dim, name: str, ranges: Ranges, sizes: Mapping[str, int]) -> Ranges:
    """The indices of a name that a range list of its dim touches first; meant to be checked by the caller."""
    offset = 0
    for factors in one.products:
        extents = [sizes[f] if isinstance(f, str) else f for f in factors]
        if name in factors:
            at = factors.index(name)
            inner = math.prod(extents[at + 1 :])
            block = extents[at] * inner
            pairs = []
            for start, stop in ranges:
                lo, hi = max(start - offset, 0), min(stop - offset, block)
                if lo < hi:
                    pairs.append((lo // inner, -(-hi // inner)))
            return tidy(pairs)
        offset += math.prod(extents)
    return ()


def _run_once_per_device(op: Op, layout: OpLayout) -> OpLayout:
    """Leave out copies of the op on a device that runs it already: once is enough."""
    if not layout.grid.repeats:
        return layout
    for index, (axis, use) in enumerate(zip(layout.grid.axes, layout.uses, strict=True)):
        if not isinstance(use, Copied):
            continue
        fibers = _fibers(layout.grid, (index,))
        unique = {rest: tuple(dict.fromkeys(map(layout.grid.device, cells))) for rest, cells in fibers.items()}
        sizes = {len(devices) for devices in unique.values()}
        if sizes == {axis.size}:
            continue
        if len(sizes) > 1:
            raise PlanError(
                f"axis {axis.name!r} copies {op.name} to {min(sizes)} devices in one place and {max(sizes)} in another",
                place=op.place,
                remedy="let every row of the device array name as many different devices",
            )
        return _run_once_per_device(op, _narrowed(layout, index, sizes.pop(), unique))
    return layout


def _fibers(grid: Grid, axes: Collection[int]) -> dict[Cell, list[Cell]]:
    """The cells that differ along these axes alone, by their coordinates on the others."""
    fibers: dict[Cell, list[Cell]] = {}
    for cell in grid.cells:
        fibers.setdefault(tuple(at for i, at in enumerate(cell) if i not in axes), []).append(cell)
    return fibers


def _narrowed(layout: OpLayout, index: int, size: int, devices: Mapping[Cell, tuple[int, ...]]) -> OpLayout:
    """The layout with one axis reduced to `size` cells (left out if that is one), on the given devices per fiber."""
    axes, uses, after = layout.grid.axes, layout.uses, index + 1
    sizes = [size if i == index else axis.size for i, axis in enumerate(axes)]
    placed = tuple(
        devices[(*cell[:index], *cell[after:])][cell[index]] for cell in itertools.product(*map(range, sizes))
    )
    if size == 1:
        return OpLayout(Grid(axes[:index] + axes[after:], placed), uses[:index] + uses[after:])
    return OpLayout(Grid((*axes[:index], Axis(axes[index].name, size), *axes[after:]), placed), uses)


def _refuse_talking_chunks(op: Op, rule: Rule, layout: OpLayout) -> None:
    """An algorithm cannot talk between cells that one device runs one after the other, nor between cells that come
    at different turns on their devices."""
    grid = layout.grid
    for name in layout.cut_names:
        exchange = rule.algorithms.get(name)
        if exchange is None or not (exchange.forward or exchange.backward):
            continue
        for cells in _fibers(grid, layout.axes_cutting(name)).values():
            if len({grid.device(cell) for cell in cells}) < len(cells) or len(set(map(grid.slot, cells))) > 1:
                raise PlanError(
                    f"{op.kind} cut along {name!r} must talk between its parts, but some of them share a device and "
                    f"run one after the other: {grid}",
                    place=op.place,
                    remedy="cut another name there, or place the parts on different devices",
                )


def _refuse_idle(devices: int, layouts: Mapping[str, OpLayout]) -> None:
    busy = {device for layout in layouts.values() for device in layout.grid.devices}
    idle = sorted(set(range(devices)) - busy)
    if idle:
        raise PlanError(
            f"no op runs on device{'s' if len(idle) > 1 else ''} {', '.join(map(str, idle))}",
            remedy=f"assign ops there, or plan for {devices - len(idle)} devices",
        )

"""Random Plans for a graph: cuts of all sorts, copies, placements that repeat, permute and divide the devices,
recomputation, stores.

`random_plan(graph, seed)` is a pure function of its arguments. Lines that the plan refuses are left out; what remains
may still contradict itself, which lowering tells with a PlanError.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from weft.ir.graph import Graph, Op
from weft.ops.rule import Rule
from weft.plan.plan import Plan
from weft.plan.primitives import CopyOver, CutBy, Transform, copy, cut, recompute

AXES = {1: ("o",), 2: ("a", "b", "c"), 3: ("t",), 4: ("q", "r"), 5: ("v",), 6: ("x",), 7: ("y",), 8: ("z",)}
"""Axis names by size: a plan may use a name with one size only."""

DIVISIONS: dict[int, list[tuple[int, ...]]] = {
    1: [()],
    2: [(2,)],
    3: [(3,)],
    4: [(4,), (2, 2)],
    5: [(5,)],
    6: [(6,), (2, 3), (3, 2)],
    7: [(7,)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}


def random_plan(graph: Graph, seed: int) -> Plan:
    """A random plan."""
    rng = random.Random(seed)
    plan = Plan(graph, rng.choice([1, 2, 2, 3, 4, 4, 4, 5, 6, 8]))
    style = rng.choice(["mesh", "mesh", "placed", "placed", "mixed"])
    share = rng.choice([0.15, 0.4, 0.8])
    mesh = rng.choice(DIVISIONS[plan.devices])
    if style != "placed":
        plan = _on_mesh(plan, rng, mesh, share)
    if style != "mesh":
        plan = _placed(plan, rng, share)
    if rng.random() < 0.25:
        plan = _recomputed(plan, rng)
    if rng.random() < 0.5:
        plan = _stored(plan, rng)
    return plan


def staged_plan(graph: Graph, draw: random.Random) -> Plan:
    """Ops in stages: runs of the program, or anyhow; some in none."""
    plan = Plan(graph, draw.randint(1, 5))
    count = draw.randint(1, 4)
    ops = list(graph.ops)
    if draw.random() < 0.5:
        edges = sorted(draw.randint(0, len(ops)) for _ in range(count - 1))
        groups = [ops[start:stop] for start, stop in zip([0, *edges], [*edges, len(ops)], strict=True)]
    else:
        groups = [[] for _ in range(count)]
        for op in ops:
            draw.choice(groups).append(op)
    for number, members in enumerate(groups):
        devices = draw.sample(range(plan.devices), draw.randint(1, plan.devices))
        kept = [op for op in members if draw.random() < 0.95]
        for op in kept:
            size = len(devices)
            if size > 1 and draw.random() < 0.5:
                line = _transform(plan.rule(op), AXES[size][0], size, draw)
                plan = plan.trans(op, line) if plan.can_trans(op, line) else plan
        if kept:
            plan = plan.stage(str(number), [op.name for op in kept], devices)
    return plan


def _names(sizes: Sequence[int]) -> list[str]:
    """Axis names for sizes, distinct."""
    taken: dict[int, int] = {}
    names = []
    for size in sizes:
        at = taken.get(size, 0)
        taken[size] = at + 1
        names.append(AXES[size][at])
    return names


def _on_mesh(plan: Plan, rng: random.Random, mesh: tuple[int, ...], share: float) -> Plan:
    """Ops cut along axes of one mesh of all devices; the others follow."""
    axes = list(zip(_names(mesh), mesh, strict=True))
    if not axes:
        return plan
    first = True
    for op in plan.graph.ops:
        if not first and rng.random() > share:
            continue
        rule = plan.rule(op)
        # the first op told has all axes, so that the mesh is what it should be
        chosen = axes if first else [axis for axis in axes if rng.random() < 0.7]
        transforms = [_transform(rule, name, size, rng) for name, size in chosen]
        if transforms and plan.can_trans(op, *transforms):
            plan = plan.trans(op, *transforms)
            first = False
        elif first:
            plan = plan.trans(op, *(copy(size, name) for name, size in axes))
            first = False
    return plan


def _placed(plan: Plan, rng: random.Random, share: float) -> Plan:
    """Ops with grids and devices of their own."""
    everybody = list(range(plan.devices))
    recent: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for op in plan.graph.ops:
        if op.name in plan.decisions or rng.random() > share:
            continue
        if recent and rng.random() < 0.4:
            sizes, devices = rng.choice(recent)
        else:
            sizes, devices = _grid(rng, everybody)
        transforms = [
            _transform(plan.rule(op), name, size, rng) for name, size in zip(_names(sizes), sizes, strict=True)
        ]
        if transforms:
            if not plan.can_trans(op, *transforms):
                continue
            plan = plan.trans(op, *transforms)
        assert plan.can_assign(op, devices), plan.can_assign(op, devices).reason
        plan = plan.assign(op, devices)
        recent.append((sizes, devices))
    return plan


def _grid(rng: random.Random, everybody: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of axes and a device for every cell."""
    kind = rng.random()
    if kind < 0.45:
        number = len(everybody)
        devices = rng.sample(everybody, number) if rng.random() < 0.3 else everybody
    elif kind < 0.7:
        number = rng.randint(1, len(everybody))
        devices = rng.sample(everybody, number)
        if rng.random() < 0.5:
            devices = sorted(devices)
    else:
        # devices repeat: blocks, round robin, or anyhow
        inner = rng.sample(everybody, rng.randint(1, min(4, len(everybody))))
        chunks = rng.choice([2, 2, 3])
        while len(inner) * chunks not in DIVISIONS:
            inner.pop()
        devices = [device for device in inner for _ in range(chunks)] if rng.random() < 0.5 else inner * chunks
        if rng.random() < 0.15:
            rng.shuffle(devices)
    return rng.choice(DIVISIONS[len(devices)]), tuple(devices)


def _transform(rule: Rule, axis: str, size: int, rng: random.Random) -> Transform:
    names = [name for name in rule.cuttable if rule.sizes[name] > 1]
    if not names or rng.random() < 0.2:
        return copy(size, axis)
    name = rng.choice(names)
    extent = rule.sizes[name]
    shares: int | list[int] = size
    kind = rng.random()
    if kind < 0.2 or extent < size:
        shares = [rng.randint(0, 3) for _ in range(size)]
        while sum(share > 0 for share in shares) > extent or not any(shares):
            shares = [rng.choice([0, 0, 1, 2]) for _ in range(size)]
    groups, units = 1, None
    if rng.random() < 0.25:
        options = [g for g in (2, 3, 4) if extent % g == 0 and extent // g >= size]
        groups = rng.choice(options) if options else 1
        if rng.random() < 0.5:
            whole = [u for u in range(size, extent // groups + 1) if (extent // groups) % u == 0]
            units = rng.choice(whole) if whole else None
    made: CutBy | CopyOver = cut(name, shares, axis, groups=groups, units=units)
    return made


def _recomputed(plan: Plan, rng: random.Random) -> Plan:
    ops = list(plan.graph.ops)
    for _ in range(rng.randint(1, 2)):
        start = rng.randrange(len(ops))
        run: list[Op] = ops[start : start + rng.randint(1, 5)]
        marked = [op for op in run if plan.decision(op).recompute is None]
        if marked and plan.can_trans(marked, recompute()):
            plan = plan.trans(marked, recompute())
    return plan


def _stored(plan: Plan, rng: random.Random) -> Plan:
    """Parameters stored in parts along an axis of the plan."""
    for parameter in plan.graph.parameters:
        shape = plan.graph.tensors[parameter.tensor].sizes
        axes = [(name, size) for name, size in plan.axes.items() if size > 1]
        if not axes or not shape or rng.random() > 0.3:
            continue
        name, size = rng.choice(axes)
        dim = rng.randrange(len(shape))
        shares: int | list[int] = size
        if shape[dim] < size:
            shares = [int(i < shape[dim]) for i in range(size)]
        line = cut(dim, shares, name)
        if parameter.used and plan.can_store(parameter, line):
            plan = plan.store(parameter, line)
    return plan

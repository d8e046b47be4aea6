"""Where parameters are stored, as recipes: ZeRO in parts over the replicas, or spread, each whole on one device.

In: a Plan that says how ops are cut (and, in a pipeline, which stage each is in). Out: the Plan with more `store`
lines. What has a `store` line already is left as it is. Promised: the same plan for the same graph. Written with public
primitives alone.

    zero     one line for each dim along which parameters are cut: each along its first dim that is long enough to be
             shared out evenly; one that has none stays whole. In groups, parts lie inside each group of replicas and
             are copied between them: fewer ranks take part in a gather, and each holds more
    spread   one line for each device, for optimizers that look at all of a parameter. Bytes are balanced over the
             devices of a replica, or of the stage that uses the parameter: the largest first, each to the device that
             has the least. A parameter that several stages use lies at the same place in each; what one device alone
             uses is left where it is
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from weft.errors import PlanError
from weft.ir.graph import Parameter
from weft.plan import primitives
from weft.plan.plan import Plan
from weft.plan.select import parameters_of

ALL = "all"
MATRICES = "matrices"
STAGES = {1: "optimizer state", 2: "gradients and optimizer state", 3: "parameters, gradients and optimizer state"}

UNEVEN = 1 / 8
"""By how much the largest part of a dim may be above an even share before another dim is looked at: parts of the first
dim are contiguous in the whole, those of others are copied, but one of 4 experts too many is half a layer."""


def zero(plan: Plan, stage: int = 3, *, axis: str = "dp", groups: int = 1, parameters: str = "**") -> Plan:
    """Store in parts along the data-parallel axis: optimizer state (1), gradients too (2), parameters too (3).

    rewrite: parameter stored as it is used  ->  its state, gradient or all of it cut along the axis

    Args:
        plan: what was decided so far.
        stage: 1, 2 or 3.
        axis: along which replicas lie.
        groups: how many groups of replicas each hold all parts; it divides the number of replicas.
        parameters: a pattern of names of parameters, or of modules that hold them; the others are left to later lines,
            or stored as they are used.
    """
    place = f"zero(plan, {stage}, axis={axis!r}, groups={groups})"
    if stage not in STAGES:
        raise PlanError(f"zero={stage} is no stage", place=place, remedy="1, 2 or 3")
    replicas = plan.axes.get(axis, 1)
    if replicas < 2:
        raise PlanError(
            f"zero={stage} stores {STAGES[stage]} in parts over the replicas, but no op is cut along {axis!r}",
            place=place,
            remedy=f"cut the batch first: dp(plan, 2), or as a recipe: {_words(plan)},zero={stage}",
        )
    parts = replicas // check_groups(groups, replicas, place, axis)
    lines: dict[int, list[str]] = {}
    for parameter in _chosen(plan, parameters_of(plan.graph, parameters), f"zero_parameters={parameters}"):
        sizes = plan.graph.tensors[parameter.tensor].sizes
        dim = _dim(sizes, parts)
        if dim is not None:
            lines.setdefault(dim, []).append(parameter.names[0])
    for dim, names in lines.items():
        cut = primitives.cut(dim, parts, axis, copies=groups)
        if stage == 1:
            plan = plan.store(names, state=cut)
        elif stage == 2:
            plan = plan.store(names, grad=cut, state=cut)
        else:
            plan = plan.store(names, cut)
    return plan


def _words(plan: Plan) -> str:
    """What a recipe would say of the plan, with replicas."""
    return ",".join(("dp=2", *(f"{name}={parts}" for name, parts in plan.axes.items() if name == "tp")))


def _dim(sizes: tuple[int, ...], parts: int) -> int | None:
    """The first dim whose largest part is near an even share; where none is, the one that comes nearest."""
    excess = {dim: math.ceil(size / parts) * parts / size - 1 for dim, size in enumerate(sizes) if size >= parts}
    if not excess:
        return None
    return next((dim for dim, more in excess.items() if more <= UNEVEN), min(excess, key=lambda dim: excess[dim]))


def check_groups(groups: int, replicas: int, place: str = "", axis: str = "dp") -> int:
    """The number of groups, if so many replicas form them and each has several."""
    if primitives.is_count(groups) and (groups == 1 or (replicas % groups == 0 and groups < replicas)):
        return groups
    options = [str(n) for n in range(1, max(replicas, 2)) if replicas % n == 0]
    raise PlanError(
        f"zero_groups={groups}: {axis}={replicas} replicas do not form {groups} groups of several",
        place=place,
        remedy=f"write zero_groups={' or '.join(options)}: the number of groups, each of which holds all parts",
    )


def spread(plan: Plan, pattern: str = ALL) -> Plan:
    """Store every trained parameter whole on one device; its gradient, optimizer state and update follow.

    rewrite: parameter stored as it is used  ->  stored whole on one device, brought to its uses

    Args:
        pattern: "all", "matrices" (those of two dims and more), or a pattern of names of parameters, or of modules.
    """
    tensors = plan.graph.tensors
    if pattern in (ALL, MATRICES):
        least = 2 if pattern == MATRICES else 0
        found = [one for one in plan.graph.parameters if len(tensors[one.tensor].sizes) >= least]
    else:
        found = parameters_of(plan.graph, pattern)
    chosen = _chosen(plan, found, f"spread={pattern}")
    load: dict[int, int] = {}
    lines: dict[int, list[str]] = {}
    for parameter in sorted(chosen, key=lambda one: -tensors[one.tensor].num_bytes):
        homes = _homes(plan, parameter)
        size = min(map(len, homes))
        if size < 2:
            continue
        place = min(range(size), key=lambda at: max(load.get(home[at], 0) for home in homes))
        for home in homes:
            load[home[place]] = load.get(home[place], 0) + tensors[parameter.tensor].num_bytes
        lines.setdefault(place, []).append(parameter.names[0])
    for place, names in sorted(lines.items()):
        plan = plan.store(names, on=place)
    return plan


def _chosen(plan: Plan, found: Iterable[Parameter], setting: str) -> list[Parameter]:
    """Those that are trained, used, and not stored by another line."""
    trained = [one for one in found if one.trainable and plan.graph.consumers[one.tensor]]
    if not trained:
        raise PlanError(f"{setting} names no trained parameter", remedy="name one, or leave out the pattern")
    return [one for one in trained if one.tensor not in plan.stores]


def _homes(plan: Plan, parameter: Parameter) -> list[tuple[int, ...]]:
    """The devices of each stage that uses a parameter; all devices where there are no stages."""
    stages = [plan.stages.get(op.name) for op in plan.graph.consumers[parameter.tensor]]
    if not any(stages):
        return [tuple(range(plan.devices))]
    return list(dict.fromkeys(stage.devices for stage in stages if stage is not None))

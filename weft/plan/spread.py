"""Spread parameters as a recipe: each lies whole on one device, for optimizers that look at all of it.

In: a Plan that says how ops are cut (and, in a pipeline, which stage each is in). Out: the Plan with a `store(...,
on=device)` line for each device. Bytes are balanced over the devices of a replica, or of the stage that uses the
parameter: the largest first, each to the device that has the least. Promised: the same plan for the same graph. A
parameter that several stages use lies at the same place in each. What has a `store` line already is left as it is, and
so is what one device alone uses. Written with public primitives alone.
"""

from __future__ import annotations

from weft.errors import PlanError
from weft.ir.graph import Parameter
from weft.plan.plan import Plan
from weft.plan.select import parameters_of

ALL = "all"
MATRICES = "matrices"


def spread(plan: Plan, pattern: str = ALL) -> Plan:
    """Store every trained parameter whole on one device; its gradient, optimizer state and update follow.

    rewrite: parameter stored as it is used  ->  stored whole on one device, brought to its uses

    Args:
        pattern: "all", "matrices" (those of two dims and more), or a pattern of names of parameters, or of modules.
    """
    chosen = [one for one in _chosen(plan, pattern) if one.trainable and plan.graph.consumers[one.tensor]]
    if not chosen:
        raise PlanError(f"spread={pattern} names no trained parameter", remedy="name one, or write spread alone")
    load: dict[int, int] = {}
    lines: dict[int, list[str]] = {}
    for parameter in sorted(chosen, key=lambda one: -_num_bytes(plan, one)):
        homes = _homes(plan, parameter)
        size = min(map(len, homes))
        if size < 2 or parameter.tensor in plan.stores:
            continue
        place = min(range(size), key=lambda at: max(load.get(home[at], 0) for home in homes))
        for home in homes:
            load[home[place]] = load.get(home[place], 0) + _num_bytes(plan, parameter)
        lines.setdefault(place, []).append(parameter.names[0])
    for place, names in sorted(lines.items()):
        plan = plan.store(names, on=place)
    return plan


def _chosen(plan: Plan, pattern: str) -> list[Parameter]:
    if pattern == ALL:
        return list(plan.graph.parameters)
    if pattern == MATRICES:
        return [one for one in plan.graph.parameters if len(plan.graph.tensors[one.tensor].sizes) > 1]
    return parameters_of(plan.graph, pattern)


def _homes(plan: Plan, parameter: Parameter) -> list[tuple[int, ...]]:
    """The devices of each stage that uses a parameter; all devices where there are no stages."""
    stages = [plan.stages.get(op.name) for op in plan.graph.consumers[parameter.tensor]]
    if not any(stages):
        return [tuple(range(plan.devices))]
    return list(dict.fromkeys(stage.devices for stage in stages if stage is not None))


def _num_bytes(plan: Plan, parameter: Parameter) -> int:
    tensor = plan.graph.tensors[parameter.tensor]
    size = tensor.dtype.itemsize
    for one in tensor.sizes:
        size *= one
    return size

"""Sequence parallelism: what lies between the tensor-parallel blocks, cut along the sequence.

In: a Plan that cuts blocks along an axis (`tp`, `megatron`). Out: the Plan in which the ops between the blocks (norms,
dropout, residual sums), until then copied along that axis, are cut along the dim that the tensors at the blocks' edges
share and that is neither the batch nor what the blocks sum: the sequence. An all-reduce at the end of a block becomes a
reduce-scatter, and an all-gather stands at the start of the next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from weft.errors import PlanError
from weft.ir.graph import Op
from weft.ir.oplayout import Cut, OpLayout
from weft.ops.rule import names_of
from weft.plan.colors import Color, Colors, Member, TensorDim, find_colors
from weft.plan.follow import resolve
from weft.plan.plan import Plan
from weft.plan.recipes.basic import cut_all
from weft.plan.recipes.chains import allowed, connected


def sp(plan: Plan, *, axis: str = "tp") -> Plan:
    """Cut the ops between the blocks of an axis along the sequence."""
    parts = plan.axes.get(axis, 1)
    if parts < 2:
        raise PlanError(
            f"sp cuts what lies between tensor-parallel blocks, but no op is cut along {axis!r}",
            remedy="cut blocks first: tp=2,sp or megatron=2,sp",
        )
    layouts = resolve(plan, plan.rules)
    cut = {op for op, layout in layouts.items() if _divided(layout, axis)}
    edges = _edges(plan, cut)
    colors = find_colors(plan.graph, plan.rules, parts)
    color = _sequence(plan, edges, colors)
    if color is None:
        raise _no_sequence(plan, edges, parts)
    members = {
        op: member
        for op, member in color.members.items()
        if op not in cut and plan.decision(op).axis(axis) is None and _fits(plan, plan.graph.by_name[op], member, parts)
    }
    chosen = {op for group in connected(plan, members) if _touches(plan, group, edges) for op in group}
    trimmed = _without_views(plan, {op: members[op] for op in members if op in chosen})
    return cut_all(plan, {op: member.cut(parts, axis) for op, member in trimmed.items()})


def _divided(layout: OpLayout, axis: str) -> bool:
    """True if the axis divides the op; one that passes addends on runs whole on every device."""
    at = layout.grid.axis(axis)
    return at >= 0 and isinstance(layout.uses[at], Cut)


def _edges(plan: Plan, cut: set[str]) -> list[str]:
    """Tensors between an op that the axis divides and one that it copies."""
    found = dict.fromkeys(
        name
        for name, producer in plan.graph.producers.items()
        for consumer in plan.graph.consumers[name]
        if (producer.name in cut) != (consumer.name in cut)
        and not producer.constant
        and plan.graph.tensors[name].needs_grad
    )
    return list(found)


def _sequence(plan: Plan, edges: list[str], colors: Colors) -> Color | None:
    """The color that the edges share, the largest in bytes: not the batch, nothing that ops would have to exchange."""
    batch = {colors.at(TensorDim(one.tensor, 0)) for one in plan.graph.inputs}
    bytes_of: Counter[int] = Counter()
    for name in edges:
        tensor = plan.graph.tensors[name]
        # the last dim is what blocks sum over, a single dim is no sequence of rows
        for dim in range(len(tensor.sizes) - 1):
            color = colors.at(TensorDim(name, dim))
            if color is not None and color not in batch:
                bytes_of[color.number] += tensor.num_bytes
    return colors.all[bytes_of.most_common(1)[0][0]] if bytes_of else None


def _fits(plan: Plan, op: Op, member: Member, parts: int) -> bool:
    """True if cutting the op pays: silent, room left by other cuts, no weight gradient larger than what it makes."""
    if member.talks or op.constant or not allowed(plan, op.name, member, parts):
        return False
    rule, tensors = plan.rule(op), plan.graph.tensors
    made = sum(math.prod(tensors[name].sizes) for name in op.outputs)
    whole = [
        math.prod(tensors[name].sizes)
        for name, dims in zip(op.inputs, rule.inputs, strict=True)
        if name in plan.graph.parameter_tensors and member.name not in names_of(dims)
    ]
    return member.name in rule.made and sum(whole) <= made


def _touches(plan: Plan, group: Iterable[str], edges: list[str]) -> bool:
    known = set(edges)
    return any(known & {*plan.graph.by_name[op].inputs, *plan.graph.by_name[op].outputs} for op in group)


def _without_views(plan: Plan, members: Mapping[str, Member]) -> dict[str, Member]:
    """Leave out views at the edges: addends pass through them as they are, and a gathered tensor is viewed for free."""
    kept = dict(members)
    for op in reversed(list(members)):
        readers = [one for name in plan.graph.by_name[op].outputs for one in plan.graph.consumers[name]]
        if plan.rule(op).source == "view" and not any(one.name in kept for one in readers):
            del kept[op]
    for op in list(kept):
        makers = [plan.graph.producers.get(name) for name in plan.graph.by_name[op].inputs]
        if plan.rule(op).source == "view" and not any(one is not None and one.name in kept for one in makers):
            del kept[op]
    return kept


def _no_sequence(plan: Plan, edges: list[str], parts: int) -> PlanError:
    shapes = sorted({str(list(plan.graph.tensors[name].sizes)) for name in edges})
    seen = f"between its blocks lie tensors of shape {', '.join(shapes[:3])}" if shapes else "no tensor leaves a block"
    return PlanError(
        f"sp: {plan.graph.name} has no sequence dim that falls into {parts} parts: {seen}",
        remedy="leave out sp, use fewer parts, or a longer example",
    )

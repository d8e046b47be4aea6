"""Recipes: functions that write a plan with the public primitives and nothing else.

    dp       cut the batch: the color of dim 0 of the inputs, on every op that has it; copy the others
    tp       cut heads, hidden dims, vocabulary: colors that divide many multiplications and move few bytes
    coshard  the colors of tp, all parts of a device on that device, one after the other and recomputed
    recompute   run modules again in backward

In: a Plan. Out: the Plan with more lines. They compose in this order; an op's axes then are (dp, tp, co). `megatron`,
`sp`, `zero` and `spread` have files of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from weft.errors import PlanError
from weft.plan import primitives
from weft.plan.chains import choose_chains
from weft.plan.colors import TensorDim, find_colors
from weft.plan.plan import Plan
from weft.plan.primitives import CutBy
from weft.plan.select import Selection, inside, is_path, module_of
from weft.plan.writing import check_count, cut_all, no_chain, nothing_to_cut

BatchDims = Mapping[str, int | None] | Sequence[int | None]


def dp(plan: Plan, parts: int, *, axis: str = "dp", batch_dims: BatchDims | None = None) -> Plan:
    """Cut the batch into so many parts.

    Args:
        plan: what was decided so far.
        parts: how many.
        axis: its name.
        batch_dims: for each tensor input its batch dim, in order or by place in the example; None for an input
            without one. If not given: dim 0 of every input of the same size as the first.
    """
    check_count("dp", parts)
    dims = _batch(plan, batch_dims)
    size = plan.graph.tensors[dims[0].tensor].sizes[dims[0].dim]
    if size < parts:
        raise PlanError(
            f"cannot cut a batch of {size} into {parts} parts",
            place=f"dim {dims[0].dim} of input {_where(plan, dims[0].tensor)}",
            remedy=(f"use dp={size} or less, or " if size > 1 else "leave out dp, or give ") + "a larger example batch",
        )
    colors = find_colors(plan.graph, plan.rules, parts, dims)
    batch = [color for color in dict.fromkeys(map(colors.at, dims)) if color is not None]
    chosen: dict[str, CutBy] = {}
    for color in batch:
        for op in color.ops:
            member = color.member(op)
            if member is not None and op not in chosen:
                chosen[op] = member.cut(parts, axis)
    if not chosen:
        place = f"dim {dims[0].dim} of input {_where(plan, dims[0].tensor)}"
        remedy = "name the batch dim of every input with batch_dims"
        raise nothing_to_cut(plan, f"no op of {plan.graph.name} can be cut along the batch", place, remedy)
    rest = [op.name for op in plan.graph.ops if op.name not in chosen]
    plan = cut_all(plan, chosen)
    return plan.trans(rest, primitives.copy(parts, axis)) if rest else plan


def _batch(plan: Plan, batch_dims: BatchDims | None) -> list[TensorDim]:
    """The batch dims of the inputs, at least one."""
    inputs = plan.graph.inputs
    tensors = plan.graph.tensors
    if batch_dims is None:
        candidates = [TensorDim(one.tensor, 0) for one in inputs if tensors[one.tensor].sizes]
        sizes = [tensors[one.tensor].sizes[0] for one in candidates]
        size = next((n for n in sizes if n > 1), 1)
        found = [one for one, n in zip(candidates, sizes, strict=True) if n == size]
    elif isinstance(batch_dims, Mapping):
        unknown = sorted(set(batch_dims) - {one.where for one in inputs})
        if unknown:
            raise PlanError(
                f"{unknown[0]!r} is no tensor input", remedy=f"inputs: {', '.join(one.where for one in inputs)}"
            )
        pairs = [(one, batch_dims.get(one.where)) for one in inputs]
        found = [TensorDim(one.tensor, dim) for one, dim in pairs if dim is not None]
    else:
        if len(batch_dims) != len(inputs):
            raise PlanError(
                f"{len(batch_dims)} batch dims for {len(inputs)} tensor inputs",
                remedy=f"give one per input, None for those without: {', '.join(one.where for one in inputs)}",
            )
        found = [TensorDim(one.tensor, d) for one, d in zip(inputs, batch_dims, strict=True) if d is not None]
    return _checked(plan, found)


def _checked(plan: Plan, dims: list[TensorDim]) -> list[TensorDim]:
    if not dims:
        raise PlanError(f"{plan.graph.name} has no input with a batch dim", remedy="name it with batch_dims")
    found = []
    for tensor, dim in dims:
        shape = plan.graph.tensors[tensor].sizes
        if not -len(shape) <= dim < len(shape):
            raise PlanError(
                f"input {_where(plan, tensor)} of shape {list(shape)} has no dim {dim}", remedy="count dims from 0"
            )
        found.append(TensorDim(tensor, dim % len(shape)))
    sizes = {plan.graph.tensors[one.tensor].sizes[one.dim] for one in found}
    if len(sizes) > 1:
        raise PlanError(
            f"the batch dims of the inputs differ in size: {sorted(sizes)}", remedy="name the right ones in batch_dims"
        )
    return found


def _where(plan: Plan, tensor: str) -> str:
    return next(one.where for one in plan.graph.inputs if one.tensor == tensor)


def tp(plan: Plan, parts: int, *, axis: str = "tp") -> Plan:
    """Cut what the inputs do not have: heads, hidden dims, vocabulary, whatever the model calls them.

    The colors are chosen by `choose_chains`: many multiplications divided, few bytes moved. Ops of no chosen color
    follow their neighbours; weights are cut where they have the color. For a transformer that is Megatron's plan; an
    embedding is cut along the vocabulary if it shares its weight with the head, otherwise there is no multiplication
    to divide and it is left whole.
    """
    check_count("tp", parts)
    chains = choose_chains(plan, parts)
    if not chains:
        raise no_chain(plan, f"{axis}={parts}", parts)
    cuts = {op: cut for chain in chains for op, cut in chain.cuts(parts, axis).items()}
    ends = dict.fromkeys(op for chain in chains for op in chain.ends if op not in cuts)
    plan = cut_all(plan, cuts)
    return plan.trans(list(ends), primitives.copy(parts, axis)) if ends else plan


def coshard(plan: Plan, parts: int, *, axis: str = "co") -> Plan:
    """Cut the chains of `tp` into parts that stay on their device, run one after the other and are recomputed.

    What a chain makes inside itself never exists whole: memory shrinks, nothing is sent. Chains through an operator
    whose parts must talk to each other are left out.
    """
    check_count("coshard", parts)
    chains = choose_chains(plan, parts, talking=False)
    if not chains:
        raise no_chain(plan, f"coshard={parts}", parts)
    mesh = _mesh(plan)
    cuts = {op: cut for chain in chains for op, cut in chain.cuts(parts, axis).items()}
    for name, size in mesh.items():
        missing = [op for op in cuts if plan.decision(op).axis(name) is None]
        if missing:
            plan = plan.trans(missing, primitives.copy(size, name))
    plan = cut_all(plan, cuts)
    placed: dict[tuple[int, ...], list[str]] = {}
    for op in cuts:
        placed.setdefault(_repeated(plan, op, mesh), []).append(op)
    for devices, ops in placed.items():
        plan = plan.assign(ops, devices)
    for chain in chains:
        plan = _recompute_together(plan, plan.select(chain.members))
    return plan


def _mesh(plan: Plan) -> dict[str, int]:
    """The axes of ops that are placed by default: row-major over all devices."""
    names = {one.axis for told in plan.decisions.values() if told.devices is None for one in told.uses}
    mesh = {name: size for name, size in plan.axes.items() if name in names}
    if not mesh and plan.devices > 1:
        return {"all": plan.devices}
    if math.prod(mesh.values()) != plan.devices:
        arithmetic = " * ".join(f"{name}={size}" for name, size in mesh.items())
        raise PlanError(
            f"the plan's axes make {arithmetic} = {math.prod(mesh.values())} parts, but there are "
            f"{plan.devices} devices",
            remedy="call coshard on a plan whose axes fill the devices",
        )
    return mesh


def _repeated(plan: Plan, op: str, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """A device for every cell of the op: the one that its coordinates on the mesh name."""
    uses = plan.decision(op).uses
    devices = []
    for cell in itertools.product(*(range(one.size) for one in uses)):
        at = {one.axis: coordinate for one, coordinate in zip(uses, cell, strict=True)}
        device = 0
        for name, size in mesh.items():
            device = device * size + at[name]
        devices.append(device)
    return tuple(devices)


def recompute(plan: Plan, pattern: str = "full") -> Plan:
    """Run modules again in backward, each module that the pattern names as one; ops marked before are left as they are.

    Args:
        plan: what was decided so far.
        pattern: of module paths (`layers.*`, everything inside included), or any selection, recomputed as one;
            "full": every layer, that is every outermost numbered module (`blocks.0`, `blocks.1` ...).
    """
    if pattern == "full":
        for layers in _layers(plan):
            plan = recompute(plan, layers)
        return plan
    if not is_path(pattern):
        return _recompute_together(plan, plan.select(pattern))
    modules = pattern.removesuffix(".**")
    chosen = plan.select(f"{modules}.**")
    # one call of a module is a run of ops; the next call of it comes after others
    for module, run in itertools.groupby(plan.graph.ops, lambda op: module_of(modules, op) if op in chosen else None):
        if module is not None:
            ops, whole = plan.select(run), inside(plan.graph, module)
            plan = _recompute_together(plan, whole if whole == ops else ops)
    return plan


def _layers(plan: Plan) -> list[str]:
    """Patterns of the outermost numbered modules."""
    found: dict[str, None] = {}
    for op in plan.graph.ops:
        words = op.path.split(".")
        number = next((at for at, word in enumerate(words) if word.isdigit()), None)
        if number is not None:
            found[".".join((*words[:number], "*"))] = None
    if not found:
        raise PlanError(
            f"{plan.graph.name} has no numbered layers to recompute one by one",
            remedy="name modules: recompute=PATTERN, such as recompute=encoder.*",
        )
    return list(found)


def _recompute_together(plan: Plan, ops: Selection) -> Plan:
    free = [op.name for op in ops if plan.decision(op).recompute is None and op.recompute is None]
    if not free:
        return plan
    return plan.trans(ops if len(free) == len(ops) else free, primitives.recompute())

"""Attention under a mask that is the same in every step, by what the mask says.

Enters: ops under working names, constants marked. Leaves: the same ops; where the mask of an attention is computed from
nothing but numbers and lets every row see all columns, or those up to its own, the call says that instead
(`is_causal`), and what only made the mask is dead. An eager model that looks at its mask does the same; a trace cannot
look, and writes the mask out. Promised: the mask itself was computed and compared, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from weft.ir.graph import Op, Ref, Tensor
from weft.ops.arguments import overload
from weft.ops.rules.pointwise import BY_EXAMPLE, is_pointwise
from weft.ops.trial import FAILURES

ATTENTION = "aten.scaled_dot_product_attention.default"
LARGEST = 1 << 28
"""Bytes that an op may make here."""
SMALL = 1 << 22
"""Elements of a tensor of which it is found out whether it repeats itself."""


def with_plain_masks(ops: Sequence[Op], tensors: Mapping[str, Tensor], known: Mapping[str, torch.Tensor]) -> list[Op]:
    """The ops, attention with its causality said in words where its mask is that.

    Args:
        known: tensors baked into the program.
    """
    makers = {name: op for op in ops for name in op.outputs}
    causal: dict[str, bool | None] = {}
    found = []
    for op in ops:
        mask = _mask_of(op)
        if mask is not None and mask not in causal:
            computed = _computed(mask, makers, tensors, known)
            causal[mask] = None if computed is None else _causality(computed)
        told = None if mask is None else causal[mask]
        found.append(op if told is None else _told(op, told))
    return found


def _mask_of(op: Op) -> str | None:
    """The mask of an attention that says nothing else of what rows may see."""
    if op.target != ATTENTION:
        return None
    given = _given(op)
    mask = given.get("attn_mask")
    return mask.name if isinstance(mask, Ref) and not given.get("is_causal") else None


def _given(op: Op) -> dict[str, Any]:
    operator = overload(op.target)
    assert operator is not None, f"{op.target} is an operator of torch"
    names = [argument.name for argument in operator._schema.arguments]
    return {**dict(zip(names, op.args, strict=False)), **dict(op.kwargs)}


def _computed(
    name: str, makers: Mapping[str, Op], tensors: Mapping[str, Tensor], known: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """The value of a tensor; None if it hangs on more than numbers, or is too large."""
    needed: dict[str, Op] = {}
    open_names = [name]
    while open_names:
        one = open_names.pop()
        op = makers.get(one)
        if one in known:
            continue
        if op is None or not _may_run(op):
            return None
        if op.name not in needed:
            needed[op.name] = op
            open_names += op.inputs
    values = {one: value for one, value in known.items() if not isinstance(value, torch._subclasses.FakeTensor)}
    for op in sorted(needed.values(), key=lambda op: int(op.name)):
        if not values.keys() >= set(op.inputs):
            return None
        try:
            made = _run(op, values, tensors)
        except FAILURES:
            # what forward does wrong is told when it runs
            return None
        if made is None:
            return None
        values |= zip(op.outputs, map(_folded, made), strict=True)
    return values.get(name)


def _may_run(op: Op) -> bool:
    elsewhere = any(isinstance(one, torch.device) and one.type != "cpu" for one in dict(op.kwargs).values())
    return op.constant and not elsewhere and overload(op.target) is not None


def _run(op: Op, values: Mapping[str, torch.Tensor], tensors: Mapping[str, Tensor]) -> list[torch.Tensor] | None:
    """What an op makes; None if that is too large. A pointwise op works on what differs only."""
    operator = overload(op.target)
    assert operator is not None, "only operators of torch are run"
    made = [tensors[name] for name in op.outputs]
    folded = is_pointwise(op) and len(made) == 1 and op.target not in BY_EXAMPLE
    read = {name: values[name] for name in op.inputs}
    if folded:
        alike = _alike(list(read.values()), len(made[0].shape))
        read = {name: _narrowed(tensor, alike) for name, tensor in read.items()}
    sizes = [torch.broadcast_shapes(*(one.shape for one in read.values()))] if folded else [one.sizes for one in made]
    is_view = any(one.alias_info is not None for one in operator._schema.returns)
    if (
        not is_view
        and sum(math.prod(size) * one.dtype.itemsize for size, one in zip(sizes, made, strict=True)) > LARGEST
    ):
        return None
    args, kwargs = pytree.tree_map(
        lambda leaf: read[leaf.name] if isinstance(leaf, Ref) else leaf, (op.args, dict(op.kwargs))
    )
    with torch.no_grad(), op.autocast.around() if op.autocast else nullcontext():
        found = pytree.tree_leaves(operator(*args, **kwargs))
    return [found[0].expand(made[0].sizes)] if folded else found


def _alike(tensors: Sequence[torch.Tensor], num_dims: int) -> set[int]:
    """Dims, counted from the right, along which every tensor repeats itself."""
    return {
        dim
        for dim in range(-num_dims, 0)
        if all(-dim > one.dim() or one.shape[dim] == 1 or one.stride(dim) == 0 for one in tensors)
    }


def _narrowed(tensor: torch.Tensor, dims: set[int]) -> torch.Tensor:
    for dim in dims:
        if -dim <= tensor.dim() and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _folded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, lying in memory once along every dim along which it repeats itself."""
    if math.prod(_narrowed(tensor, _alike([tensor], tensor.dim())).shape) > SMALL:
        return tensor
    for dim in range(tensor.dim()):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != 0:
            once = tensor.narrow(dim, 0, 1).expand_as(tensor)
            tensor = once if torch.equal(tensor, once) else tensor
    return tensor


def _causality(mask: torch.Tensor) -> bool | None:
    """False for a mask that hides nothing, True for one that hides what comes later, None for any other."""
    mask = _narrowed(mask, {dim for dim in _alike([mask], mask.dim()) if dim < -2})
    if mask.dtype == torch.bool:
        seen = mask
    elif mask.is_floating_point():
        seen = mask == 0
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()):
            return None
    else:
        return None
    if bool(seen.all()):
        return False
    if seen.dim() < 2:
        return None
    return True if torch.equal(seen, torch.ones_like(seen).tril()) else None


def _told(op: Op, causal: bool) -> Op:
    """The attention without its mask."""
    rest = {name: value for name, value in _given(op).items() if name not in ("query", "key", "value", "attn_mask")}
    kwargs = {**rest, "is_causal": True} if causal else rest
    return replace(op, args=op.args[:3], kwargs=tuple(kwargs.items()))

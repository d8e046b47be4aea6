"""Kernels: one call of an operator of torch's on a device, as what its time depends on.

In: an operator and its arguments, real or fake. Out: a Kernel: a key that is equal for calls that take equally long,
the floating-point operations and the bytes that it reads and writes. The key is JSON: the call can be made again from
it (`measure.py`), and it is what times are kept under (`profiled.py`).

    key := [operator, argument ..., {keyword: argument ...}]
    argument := {"t": [dtype, sizes, strides]} | [argument ...] | a plain value | {"dtype": name} | ...

Views and other calls that no device runs are no kernels: `kernel_of` gives None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

aten = torch.ops.aten

FREE = frozenset(
    (
        *("detach", "alias", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_"),
        *("_reshape_alias", "lift_fresh", "_unsafe_view", "sym_size", "sym_numel", "resize_", "is_same_size"),
    )
)
"""Operators that give memory, or another look at it, and compute nothing."""


@dataclass(frozen=True)
class Kernel:
    """A call of an operator.

    Args:
        op: its name, as `mm`. key: what its time depends on. dtype: in which it computes, as `float32`.
        flops: floating-point operations, of products, convolutions and attention; else 0.
        bytes: that it reads and writes.
        elements: of the largest tensor.
    """

    op: str
    key: str
    dtype: str
    flops: int
    bytes: int
    elements: int


def kernel_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Kernel | None:
    """The kernel of a call that was dispatched; None if nothing is computed."""
    packet = func.overloadpacket
    name = packet.__name__
    if name in FREE or func.is_view or func.namespace == "prim":
        return None
    reads = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    makes = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
    if not reads and not makes:
        return None
    moved = sum(one.numel() * one.dtype.itemsize for one in (*reads, *makes))
    floats = [one.dtype for one in (*reads, *makes) if one.dtype.is_floating_point]
    return Kernel(
        name,
        key_of(func, args, kwargs),
        str((floats or [one.dtype for one in (*reads, *makes)])[0]).removeprefix("torch."),
        _flops(packet, args, kwargs, result),
        moved,
        max((one.numel() for one in (*reads, *makes)), default=0),
    )


def key_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What the time of a call depends on, as JSON."""
    name = f"{func.overloadpacket.__name__}.{func._overloadname}"
    space = func.namespace
    named = {name: _argument(one) for name, one in sorted(kwargs.items())}
    return json.dumps([name if space == "aten" else f"{space}::{name}", *map(_argument, args), named])


def _argument(value: Any) -> Any:
    match value:
        case Tensor():
            return {"t": [str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride())]}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": value.type}
        case torch.layout() | torch.memory_format():
            return {"kind": str(value).removeprefix("torch.")}
        case float():
            # no time depends on it
            return {"float": 0}
        case list() | tuple():
            return [_argument(one) for one in value]
    return value if isinstance(value, bool | str | int | None) else {"other": type(value).__name__}


def _flops(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    counted = flop_registry.get(packet)
    if counted is not None:
        return int(counted(*args, **kwargs, out_val=result))
    name = packet.__name__
    if "scaled_dot_product" not in name or "for_cpu" not in name:
        return 0
    # torch counts the kernels of accelerators only. Backward makes the scores again, and four products beside
    backward = "backward" in name
    query, key, value = (one.shape for one in (args[1:4] if backward else args[:3]))
    forward = int(sdpa_flop_count(query, key, value))
    return forward * 5 // 2 if backward else forward

"""Kernels: one call of an operator of torch's on a device, as what its time depends on.

In: an operator and its arguments, real or fake. Out: a Kernel: a key that is equal for calls that take equally long,
the floating-point operations and the bytes that it reads and writes. The key is JSON: the call can be made again from
it (`measure.py`), and it is what times are kept under (`profiled.py`).

    key := [operator, argument ..., {keyword: argument ...}]
    argument := {"t": [dtype, sizes, strides]} | [argument ...] | a plain value | {"dtype": name} | ...

Views and other calls that no device runs are no kernels: `kernel_of` gives None. Bytes are those that the call has to
move: of a tensor that is expanded the elements that are there, of a table the rows that are asked for.

A key can be read again: `read` gives the operator and its arguments by name, `structure` what keys of one operator at
other sizes have in common.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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

TABLES = frozenset(
    (
        *("embedding", "index", "_unsafe_index", "index_select", "gather", "nll_loss_forward", "index_add_"),
        *("index_copy_", "index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "scatter_reduce_"),
    )
)
"""Operators that touch of their first tensor what others have room for."""
OVERWRITTEN = frozenset(
    ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "_foreach_copy_")
)
"""Operators that do not read what they write to."""
BY_VALUE = ("pow", "norm", "dropout", "bernoulli", "scaled_dot_product")
"""Parts of names of operators whose time depends on numbers: an exponent, an order, whether anything is dropped."""
SIZE = 16
"""A whole number from which on it is taken for a size, not for a dim, a stride or a choice."""

FORMAT = 2
"""Of keys, and of what is counted: what was measured under another one says nothing."""


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
    # fake tensors are asked for their device through operators too
    if name in FREE or func.is_view or func.namespace == "prim":
        return None
    reads = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    makes = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
    if not reads and not makes:
        return None
    # optimizers write to lists of tensors and return nothing
    makes += [one for one in _written(func, args, kwargs) if not any(one is other for other in makes)]
    floats = [one.dtype for one in (*reads, *makes) if one.dtype.is_floating_point]
    return Kernel(
        name,
        key_of(func, args, kwargs),
        str((floats or [one.dtype for one in (*reads, *makes)])[0]).removeprefix("torch."),
        _flops(packet, args, kwargs, result),
        _moved(name, reads, makes),
        max((one.numel() for one in (*reads, *makes)), default=0),
    )


def key_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What the time of a call depends on, as JSON."""
    name = f"{func.overloadpacket.__name__}.{func._overloadname}"
    space, exact = func.namespace, any(part in name for part in BY_VALUE)
    named = {name: _argument(one, exact) for name, one in sorted(kwargs.items())}
    return json.dumps(
        [name if space == "aten" else f"{space}::{name}", *(_argument(one, exact) for one in args), named]
    )


@dataclass(frozen=True)
class Read:
    """A key that was read: the operator, its arguments in JSON in order, and all of them by the schema's names."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    named: Mapping[str, Any]


@lru_cache(maxsize=1 << 14)
def read(key: str) -> Read:
    """The call that a key describes. Raises AttributeError if this torch does not know the operator."""
    full, *args, kwargs = json.loads(key)
    space, name = full.split("::", 1) if "::" in full else ("aten", full)
    packet, overload = name.rsplit(".", 1)
    func = getattr(getattr(getattr(torch.ops, space), packet), overload)
    names = [one.name for one in func._schema.arguments]
    return Read(func, tuple(args), kwargs, {**dict(zip(names, args, strict=False)), **kwargs})


def sizes_of(argument: Any) -> tuple[int, ...] | None:
    """The sizes of an argument of a key; None if it is no tensor."""
    return tuple(argument["t"][1]) if isinstance(argument, dict) and "t" in argument else None


@lru_cache(maxsize=1 << 14)
def structure(key: str) -> str:
    """What a key has in common with those of the same call at other sizes.

    >>> structure('["mm.default", {"t": ["float32", [64, 32], [32, 1]]}, {"t": ["float32", [32, 64], [1, 32]]}, {}]')
    '["mm.default", {"t": ["float32", [1, 0]]}, {"t": ["float32", [0, 1]]}, {}]'
    """
    return json.dumps(_shapeless(json.loads(key)))


def _shapeless(value: Any) -> Any:
    match value:
        case {"t": [dtype, _, strides]}:
            # dims by how far their elements lie apart, -1 for one that is expanded
            ranks = sorted({stride for stride in strides if stride})
            return {"t": [dtype, [ranks.index(stride) if stride else -1 for stride in strides]]}
        case list():
            found = [_shapeless(one) for one in value]
            if value and all(sizes_of(one) is not None for one in value):
                # a list of many tensors is as one of few
                return [json.loads(one) for one in sorted({json.dumps(one) for one in found})]
            return found
        case dict():
            return {name: _shapeless(one) for name, one in value.items()}
        case bool():
            return value
        case int() if abs(value) >= SIZE:
            return "size"
    return value


def _argument(value: Any, exact: bool) -> Any:
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
            # of most operators no time depends on it, unless it is 0; JSON has no infinity
            return {"float": (value if math.isfinite(value) else str(value)) if exact else int(value != 0)}
        case list() | tuple():
            return [_argument(one, exact) for one in value]
    return value if isinstance(value, bool | str | int | None) else {"other": type(value).__name__}


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call writes to."""
    names = [one.name for one in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return [one for one in pytree.tree_leaves([given.get(name) for name in written]) if isinstance(one, Tensor)]


def _moved(name: str, reads: Sequence[Tensor], makes: Sequence[Tensor]) -> int:
    """Bytes that are read and written."""
    if name in OVERWRITTEN:
        reads = [one for one in reads if not any(one is other for other in makes)]
    moved = [(one, _held(one)) for one in (*reads, *makes)]
    if name in TABLES:
        table = reads[0]
        room = sum(count for one, count in moved if one is not table)
        return sum(min(count, room) if one is table else count for one, count in moved)
    return sum(count for _, count in moved)


def _held(tensor: Tensor) -> int:
    """Bytes of a tensor, each element that is there once."""
    there = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(there) * tensor.dtype.itemsize


def _flops(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    counted = flop_registry.get(packet)
    if counted is not None:
        return int(counted(*args, **kwargs, out_val=result))
    name = packet.__name__
    if name == "_grouped_mm":
        (*groups, rows, width), columns = args[0].shape, args[1].shape[-1]
        return int(2 * rows * width * columns * (groups[0] if groups and args[1].dim() == 3 else 1))
    if "scaled_dot_product" not in name or "for_cpu" not in name:
        return 0
    # torch counts the kernels of accelerators only. Backward makes the scores again, and four products beside
    backward = "backward" in name
    query, key, value = (one.shape for one in (args[1:4] if backward else args[:3]))
    forward = int(sdpa_flop_count(query, key, value))
    return forward * 5 // 2 if backward else forward

"""Attention with fewer key heads than query heads, as attention with as many.

Enters: a call of `aten.scaled_dot_product_attention` with `enable_gqa`. Leaves: the same call without it, on keys and
values whose heads are repeated for the query heads that share them: then the heads may be cut finer than the key heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from weft.capture.builder import Builder, Context
from weft.capture.draws import bound, name_of
from weft.ir.graph import Ref

HEADS = -3
"""The dim of the heads."""


def with_repeated_heads(
    target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], builder: Builder, context: Context
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the call that is made instead."""
    if name_of(target) != "scaled_dot_product_attention" or not kwargs.get("enable_gqa"):
        return args, kwargs
    values = bound(target, args, kwargs)
    heads = builder.fakes[values["query"].name].shape[HEADS]
    for name in ("key", "value"):
        shared = builder.fakes[values[name].name].shape[HEADS]
        if shared != heads:
            repeated = (values[name], int(heads) // int(shared), HEADS)
            values[name] = Ref(builder.emit(torch.ops.aten.repeat_interleave.self_int, repeated, context=context)[0])
    rest = {name: value for name, value in kwargs.items() if name not in ("query", "key", "value", "enable_gqa")}
    return (values["query"], values["key"], values["value"], *args[3:]), rest

"""Batch norm's running statistics as explicit updates.

`aten.batch_norm` is declared pure and yet moves its running statistics. Enters: a call in training with running
statistics. Leaves: the same call without them, and what they become: mean and unbiased variance of the batch, moved
by the momentum, without gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from weft.capture.builder import Builder, Context
from weft.capture.draws import bound, name_of
from weft.errors import CaptureError
from weft.ir.graph import Ref

aten = torch.ops.aten


def updates_statistics(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], place: str) -> bool:
    """Whether this call moves running statistics."""
    name = name_of(target)
    if name == "batch_norm":
        values = bound(target, args, kwargs)
        return bool(values["training"]) and values["running_mean"] is not None
    if name == "instance_norm":
        values = bound(target, args, kwargs)
        if values["use_input_stats"] and values["running_mean"] is not None:
            raise CaptureError(
                "instance norm moves running statistics",
                place=place,
                remedy="track_running_stats=False, or evaluation mode",
            )
    return False


def update_statistics(
    args: tuple[Any, ...], kwargs: dict[str, Any], builder: Builder, context: Context
) -> tuple[str, tuple[str, str]]:
    """The normalised tensor, and (running mean, running variance) after the call."""
    values = bound(aten.batch_norm.default, args, kwargs)
    values |= {"running_mean": None, "running_var": None}
    mean, variance = args[3], args[4]
    output = builder.emit(aten.batch_norm.default, tuple(values.values()), context=context)[0]
    quiet = replace(context, grad=False)
    x = values["input"]
    stored = builder.fakes[mean.name].dtype
    if builder.fakes[x.name].dtype != stored:
        x = Ref(builder.emit(aten.to.dtype, (x, stored), context=quiet)[0])
    dims = [dim for dim in range(builder.fakes[x.name].dim()) if dim != 1]
    momentum = values["momentum"]
    moved = []
    batch_mean = builder.emit(aten.mean.dim, (x, dims), context=quiet)[0]
    batch_variance = builder.emit(aten.var.correction, (x, dims), {"correction": 1}, context=quiet)[0]
    for old, new in ((mean, batch_mean), (variance, batch_variance)):
        moved.append(builder.emit(aten.lerp.Scalar, (old, Ref(new), momentum), context=quiet)[0])
    return output, (moved[0], moved[1])

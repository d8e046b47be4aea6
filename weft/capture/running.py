"""Running statistics of batch and instance norm as explicit updates.

`aten.batch_norm` and `aten.instance_norm` are declared pure and yet move their running statistics. Enters: a call in
training with running statistics. Leaves: the same call without them, and what they become: mean and unbiased variance
of the batch (of each sample, averaged, for instance norm), moved by the momentum, without gradient.

A batch norm without momentum averages over all batches so far. torch reads their number out of its buffer, which a
trace cannot; `forward_of_batch_norm` stands in for it with the same arithmetic on tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from weft.capture.builder import Builder, Context
from weft.capture.draws import bound, name_of
from weft.ir.graph import Ref

aten = torch.ops.aten
TRAINS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
"""The argument by which each norm is told to use and keep the statistics of its input."""
torchs_forward = _BatchNorm.forward


def updates_statistics(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call moves running statistics."""
    trains = TRAINS.get(name_of(target))
    values = {} if trains is None else bound(target, args, kwargs)
    return trains is not None and bool(values[trains]) and values["running_mean"] is not None


def update_statistics(
    target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], builder: Builder, context: Context
) -> tuple[str, tuple[str, str]]:
    """The normalised tensor, and (running mean, running variance) after the call."""
    values = bound(target, args, kwargs)
    mean, variance = values["running_mean"], values["running_var"]
    values |= {"running_mean": None, "running_var": None}
    output = builder.emit(target, tuple(values.values()), context=context)[0]
    quiet = replace(context, grad=False)
    x = values["input"]
    stored = builder.fakes[mean.name].dtype
    if builder.fakes[x.name].dtype != stored:
        x = Ref(builder.emit(aten.to.dtype, (x, stored), context=quiet)[0])
    per_sample = name_of(target) == "instance_norm"
    dims = [dim for dim in range(builder.fakes[x.name].dim()) if dim > 1 or (dim == 0 and not per_sample)]
    momentum = values["momentum"]
    moved = []
    batch_mean = builder.emit(aten.mean.dim, (x, dims), context=quiet)[0]
    batch_variance = builder.emit(aten.var.correction, (x, dims), {"correction": 1}, context=quiet)[0]
    for old, found in ((mean, batch_mean), (variance, batch_variance)):
        new = builder.emit(aten.mean.dim, (Ref(found), [0]), context=quiet)[0] if per_sample else found
        moved.append(builder.emit(aten.lerp.Scalar, (old, Ref(new), momentum), context=quiet)[0])
    return output, (moved[0], moved[1])


def forward_of_batch_norm(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """Stands in for the forward of torch's batch norm while tracing."""
    count = self.num_batches_tracked
    averages = self.momentum is None and self.training and self.track_running_stats
    if not averages or count is None or self.running_mean is None or self.running_var is None:
        return torchs_forward(self, input)
    self._check_input_dim(input)
    count.add_(1)
    with torch.no_grad():
        x = input.to(self.running_mean.dtype)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        share = 1.0 / count.to(self.running_mean.dtype)
        self.running_mean.lerp_(x.mean(dims), share)
        self.running_var.lerp_(x.var(dims), share)
    return functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

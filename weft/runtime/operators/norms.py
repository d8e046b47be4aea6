"""Normalisations whose statistics run over cut dims: layer, root-mean-square, group and batch norm.

In: the local part, the whole count of elements per statistic, and the communicators along the cut dims that are
normalised over. Out: the local part of the result, with statistics of the whole. Weight and bias are local parts;
where they lack a cut name their gradient is an addend. Two all-reduces forward (one if the mean is not subtracted),
one backward. Saved for backward: the normalised part and one number per statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.comm import Comms, reduce, sum_over, wide


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps), or x / sqrt(mean square + eps) if not centred; and the statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: tuple[int, ...], count: int, eps: float, centred: bool, comms: Comms
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean = reduce(x.sum(dims, keepdim=True), comms) / count if centred else x.new_zeros(())
        shifted = x - mean
        square = reduce(shifted.square().sum(dims, keepdim=True), comms) / count
        rstd = (square + eps).rsqrt()
        out = shifted * rstd
        ctx.save_for_backward(out, rstd)
        ctx.dims, ctx.count, ctx.centred, ctx.comms = dims, count, centred, comms
        ctx.mark_non_differentiable(mean, rstd)
        return out, mean, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        out, rstd = ctx.saved_tensors
        along = (grad * out).sum(ctx.dims, keepdim=True)
        sums = torch.stack([along, grad.sum(ctx.dims, keepdim=True)]) if ctx.centred else along.unsqueeze(0)
        means = reduce(sums, ctx.comms) / ctx.count
        inner = grad - out * means[0]
        return rstd * (inner - means[1] if ctx.centred else inner), None, None, None, None, None


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def native_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, num_dims: int, count: int, eps: float, comms: Comms
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm over the last `num_dims` dims: the result, the mean and the reciprocal deviation."""
    dims = tuple(range(x.ndim - num_dims, x.ndim))
    out, mean, rstd = _Normalise.apply(wide(x), dims, count, eps, True, comms)
    return _affine(out, weight, bias).to(x.dtype), mean, rstd


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, **options: Any) -> Tensor:
    """Layer norm, the result alone."""
    return native_layer_norm(x, weight, bias, **options)[0]


def native_rms_norm(
    x: Tensor, weight: Tensor | None, *, num_dims: int, count: int, eps: float | None, comms: Comms
) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm over the last `num_dims` dims: the result and the reciprocal root."""
    dims = tuple(range(x.ndim - num_dims, x.ndim))
    small = torch.finfo(x.dtype).eps if eps is None else eps
    out, _, rstd = _Normalise.apply(wide(x), dims, count, small, False, comms)
    return _affine(out, weight, None).to(x.dtype), rstd


def rms_norm(x: Tensor, weight: Tensor | None, **options: Any) -> Tensor:
    """Root-mean-square norm, the result alone."""
    return native_rms_norm(x, weight, **options)[0]


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, groups: int, count: int, eps: float, comms: Comms
) -> Tensor:
    """Group norm of [n, (groups c), ...]; `groups` is the local number, c may be cut."""
    if groups == 0 or (x.numel() == 0 and not comms):
        return _affine(x, *_per_channel(x, weight, bias))
    grouped = wide(x).unflatten(1, (groups, x.shape[1] // groups))
    out, _, _ = _Normalise.apply(grouped, tuple(range(2, grouped.ndim)), count, eps, True, comms)
    return _affine(out.flatten(1, 2), *_per_channel(x, weight, bias)).to(x.dtype)


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, count: int, eps: float, comms: Comms
) -> Tensor:
    """Batch norm of [n, c, ...] with the statistics of the whole batch."""
    dims = tuple(d for d in range(x.ndim) if d != 1)
    out, _, _ = _Normalise.apply(wide(x), dims, count, eps, True, comms)
    return _affine(out, *_per_channel(x, weight, bias)).to(x.dtype)


def weight_norm(v: Tensor, g: Tensor, *, dim: int, comms: Comms) -> Tensor:
    """`v` with every slice along `dim` brought to length `g`; lengths are taken over all cells."""
    dims = tuple(d for d in range(v.ndim) if d != dim)
    squares = sum_over(wide(v).square().sum(dims, keepdim=True), comms)
    return (v * (g / squares.sqrt())).to(v.dtype)


def _per_channel(x: Tensor, *values: Tensor | None) -> Sequence[Tensor | None]:
    return [None if value is None else value.view(len(value), *(1,) * (x.ndim - 2)) for value in values]

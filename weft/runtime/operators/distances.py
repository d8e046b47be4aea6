"""Norms and distances along cut dims.

In: local parts and the communicators along the cut dims. Out: the complete result on every cell, which takes its
complete gradient there. Empty parts take part with the neutral element. Where torch gives no gradient, none is given.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.comm import Comms, reduce, sum_to_copy, wide
from weft.runtime.operators.reductions import extreme, kept


class _VectorNorm(torch.autograd.Function):
    """The p-norm for 0 < p < inf, dims kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: float, dims: tuple[int, ...], comms: Comms) -> Tensor:
        out = reduce(x.abs().pow(order).sum(dims, keepdim=True), comms).pow(1 / order)
        ctx.save_for_backward(x, out)
        ctx.order = order
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, out = ctx.saved_tensors
        # zero has no direction: torch gives it no gradient
        share = (x.abs() / out).pow(ctx.order - 1).masked_fill(x == 0, 0)
        return grad * x.sgn() * share, None, None, None


def vector_norm(
    x: Tensor, dims: tuple[int, ...], keepdim: bool, *, order: float, dtype: torch.dtype | None = None, comms: Comms
) -> Tensor:
    """The norm of any order over dims some of which are cut."""
    x = x if dtype is None else x.to(dtype)
    if math.isinf(order):
        return extreme(x.abs(), dims, keepdim, kind="max" if order > 0 else "min", comms=comms)
    out: Tensor
    if order == 0:
        out = sum_to_copy((x != 0).to(wide(x).abs().dtype).sum(dims, keepdim=True), comms)
        # torch gives the count of elements a gradient of zeros
        out = out + (x * 0).abs().sum(dims, keepdim=True) if x.requires_grad else out
    else:
        out = _VectorNorm.apply(wide(x), order, dims, comms)
    return kept(out, dims, keepdim).to(x.abs().dtype)


def distance(
    x: Tensor, y: Tensor, dims: tuple[int, ...], keepdim: bool, *, p: float = 2.0, eps: float = 0.0, comms: Comms
) -> Tensor:
    """The norm of `x - y + eps`."""
    return vector_norm(x - y + eps, dims, keepdim, order=p, comms=comms)


def cosine(x: Tensor, y: Tensor, dims: tuple[int, ...], keepdim: bool, *, eps: float, comms: Comms) -> Tensor:
    """The cosine of the angle between x and y; `eps` bounds each length from below, without touching gradients."""
    dtype = torch.result_type(x, y)
    x, y = torch.broadcast_tensors(wide(x), wide(y))
    sums = torch.stack([(a * b).sum(dims, keepdim=keepdim) for a, b in ((x, y), (x, x), (y, y))])
    dot, *squares = sum_to_copy(sums, comms)
    lengths = [torch.where(square > 0, square, 1).sqrt() * (square > 0) for square in squares]
    bounded = [length + (length.detach().clamp(min=eps) - length.detach()) for length in lengths]
    found: Tensor = dot / (bounded[0] * bounded[1])
    return found.to(dtype)

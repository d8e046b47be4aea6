"""Softmax, log-softmax and log-sum-exp along dims that are cut over several cells.

In: the local part, and the communicators along the cut dims. Softmax and log-softmax leave the local part of the
result; log-sum-exp leaves the complete result on every cell and takes its complete gradient there. Parts may be
empty. Saved for backward: one tensor of the part's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.comm import Comms, reduce, wide


def largest(x: Tensor, dims: Sequence[int], comms: Comms) -> Tensor:
    """The maximum over dims and cells, dims kept, outside autograd."""
    x = x.detach()
    if any(x.shape[d] == 0 for d in dims):
        shape = [1 if d in {e % x.ndim for e in dims} else size for d, size in enumerate(x.shape)]
        found = x.new_full(shape, -torch.inf)
    else:
        found = x.amax(dim=tuple(dims), keepdim=True)
    return reduce(found, comms, "max")


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, log: bool, comms: Comms) -> Tensor:
        shifted = x - largest(x, (dim,), comms)
        exp = shifted.exp()
        total = reduce(exp.sum(dim, keepdim=True), comms)
        out = shifted - total.log() if log else exp / total
        ctx.save_for_backward(out)
        ctx.dim, ctx.log, ctx.comms = dim, log, comms
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (out,) = ctx.saved_tensors
        addend = grad if ctx.log else grad * out
        total = reduce(addend.sum(ctx.dim, keepdim=True), ctx.comms)
        return (grad - out.exp() * total if ctx.log else addend - out * total), None, None, None


def softmax(x: Tensor, dim: int, *, dtype: torch.dtype | None = None, log: bool = False, comms: Comms = ()) -> Tensor:
    """Softmax (or its logarithm) along a cut dim."""
    kept = dtype or x.dtype
    x = x if dtype is None else x.to(dtype)
    return _Softmax.apply(wide(x), dim, log, comms).to(kept)  # type: ignore[no-any-return]


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, top: Tensor, dims: tuple[int, ...], comms: Comms) -> Tensor:
        out = reduce((x - top).exp().sum(dims, keepdim=True), comms).log() + top
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, out = ctx.saved_tensors
        return grad * (x - out).exp(), None, None, None


def logsumexp(x: Tensor, dims: Sequence[int], *, keepdim: bool = False, comms: Comms = ()) -> Tensor:
    """Log of the sum of exponentials over dims some of which are cut: complete on every cell."""
    dims = tuple(d % x.ndim for d in dims)
    values = wide(x)
    top = largest(values, dims, comms)
    out: Tensor = _LogSumExp.apply(values, top.masked_fill(top.abs() == torch.inf, 0), dims, comms)
    return (out if keepdim else out.squeeze(dims)).to(x.dtype)


def scores_and_total(x: Tensor, dim: int, comms: Comms) -> tuple[Tensor, Tensor]:
    """x shifted to a largest value of 0 along `dim`, and the log of the sum of its exponentials, complete."""
    # a shift that is constant along `dim` cancels in every difference, and so carries no gradient
    scores = x - largest(x, (dim,), comms)
    total: Tensor = _LogSumExp.apply(scores, scores.new_zeros(()), (dim,), comms)
    return scores, total.squeeze(dim)

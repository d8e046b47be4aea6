"""Reductions over cut dims: mean, variance, extremes and their positions, products, truth values, softmax.

In: the local part, the reduced dims (counted from the left), the communicators along those that are cut. `mean_part`
leaves an addend and needs no communication; softmax and log-softmax leave the local part of the result; all others
leave the complete result on every cell and take its complete gradient there. Empty parts take part with the neutral
element. Ties share the gradient exactly as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.comm import Comm, Comms, reduce, sum_to_copy, wide
from weft.runtime.layout.indices import Intervals, linear_index


def kept(out: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """A result with its reduced dims kept, or without them."""
    return out if keepdim else out.squeeze(dims)


def mean_part(
    x: Tensor, dims: tuple[int, ...], keepdim: bool, *, count: int, dtype: torch.dtype | None = None
) -> Tensor:
    """The local part's share of a mean over `count` elements."""
    return x.sum(dims, keepdim=keepdim, dtype=dtype or x.dtype) / count


class _Variance(torch.autograd.Function):
    """Variance or deviation around the mean of the whole, dims kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, dims: tuple[int, ...], freedom: float, root: bool, comms: Comms
    ) -> Tensor:
        shifted = x - mean
        out = reduce(shifted.square().sum(dims, keepdim=True), comms) / freedom
        out = out.sqrt() if root else out
        ctx.save_for_backward(x, mean, out)
        ctx.freedom, ctx.root = freedom, root
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, out = ctx.saved_tensors
        if ctx.root:
            grad = (grad / (out * 2)).masked_fill(out == 0, 0)
        return (2.0 / ctx.freedom) * grad * (x - mean), None, None, None, None, None


def variance(
    x: Tensor, dims: tuple[int, ...], keepdim: bool, *, count: int, correction: float, root: bool, comms: Comms
) -> tuple[Tensor, Tensor]:
    """Variance (its root if asked) and mean."""
    values = wide(x)
    mean = sum_to_copy(values.sum(dims, keepdim=True), comms) / count
    # no elements to spare: torch divides by zero, and so do we
    freedom = values.new_full((), max(0.0, count - correction))
    out: Tensor = _Variance.apply(values, mean.detach(), dims, freedom, root, comms)
    return kept(out.to(x.dtype), dims, keepdim), kept(mean.to(x.dtype), dims, keepdim)


def variance_only(x: Tensor, dims: tuple[int, ...], keepdim: bool, **options: Any) -> Tensor:
    """Variance, or its root, without the mean."""
    return variance(x, dims, keepdim, **options)[0]


def _extreme(x: Tensor, dims: tuple[int, ...], kind: str, comms: Comms) -> Tensor:
    """The `max` or `min` over dims and cells, dims kept, outside autograd."""
    x = x.detach()
    if any(x.shape[d] == 0 for d in dims):
        shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
        found = x.new_full(shape, _neutral(x.dtype, kind))
    else:
        found = x.amax(dims, keepdim=True) if kind == "max" else x.amin(dims, keepdim=True)
    return reduce(found, comms, kind)


def _neutral(dtype: torch.dtype, kind: str) -> float | int | bool:
    if dtype.is_floating_point:
        return -torch.inf if kind == "max" else torch.inf
    if dtype == torch.bool:
        return kind == "min"
    return torch.iinfo(dtype).min if kind == "max" else torch.iinfo(dtype).max


class _Shared(torch.autograd.Function):
    """An extreme whose gradient is shared evenly by all elements that attain it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...], kind: str, comms: Comms) -> Tensor:
        out = _extreme(x, dims, kind, comms)
        ctx.save_for_backward(x, out)
        ctx.dims, ctx.comms = dims, comms
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, out = ctx.saved_tensors
        attains = (x == out) | (x.isnan() & out.isnan())
        number = reduce(attains.sum(ctx.dims, keepdim=True), ctx.comms)
        return attains * (grad / number), None, None, None


def extreme(x: Tensor, dims: tuple[int, ...], keepdim: bool, *, kind: str, comms: Comms) -> Tensor:
    """`amax` or `amin`."""
    return kept(_Shared.apply(x, dims, kind, comms), dims, keepdim)


class _First(torch.autograd.Function):
    """An extreme and the smallest index that attains it, which alone receives the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, dims: tuple[int, ...], kind: str, comms: Comms
    ) -> tuple[Tensor, Tensor]:
        out = _extreme(x, dims, kind, comms)
        nowhere = torch.iinfo(torch.int64).max
        candidates = torch.where((x == out) | x.isnan(), index, nowhere)
        where = _extreme(candidates, dims, "min", comms)
        ctx.save_for_backward(index, where)
        ctx.mark_non_differentiable(where)
        return out, where

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, None, None, None, None]:
        index, where = ctx.saved_tensors
        return torch.where(index == where, grad, 0), None, None, None, None


def extreme_and_index(
    x: Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    *,
    kind: str,
    shape: Sequence[int],
    at: Sequence[Intervals],
    comms: Comms,
) -> tuple[Tensor, Tensor]:
    """`max.dim` or `min.dim`; `shape` and `at` are the reduced dims' whole sizes and the intervals held here."""
    index = linear_index(shape, at, x.device)
    index = index.view([x.shape[d] if d in dims else 1 for d in range(x.ndim)])
    out, where = _First.apply(x, index, dims, kind, comms)
    return kept(out, dims, keepdim), kept(where, dims, keepdim)


def extreme_index(x: Tensor, dims: tuple[int, ...], keepdim: bool, **options: Any) -> Tensor:
    """`argmax` or `argmin`."""
    return extreme_and_index(x.detach(), dims, keepdim, **options)[1]


def truth(x: Tensor, dims: tuple[int, ...], keepdim: bool, *, kind: str, comms: Comms) -> Tensor:
    """`any` (the `max` of truth values) or `all` (the `min`)."""
    out = _extreme((x != 0).to(torch.uint8), dims, kind, comms)
    return kept(out, dims, keepdim).to(torch.uint8 if x.dtype == torch.uint8 else torch.bool)


def aminmax(x: Tensor, dims: tuple[int, ...], keepdim: bool, *, comms: Comms) -> tuple[Tensor, Tensor]:
    """Both extremes."""
    low, high = (extreme(x, dims, keepdim, kind=kind, comms=comms) for kind in ("min", "max"))
    return low, high


class _Product(torch.autograd.Function):
    """The product over the cells; what reaches each factor is the product of all others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        factors = torch.stack(comm.all_gather(x.contiguous()))
        ctx.save_for_backward(torch.cat([factors[: comm.rank], factors[comm.rank + 1 :]]).prod(0))
        return factors.prod(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (others,) = ctx.saved_tensors
        return grad * others.conj(), None


def prod(x: Tensor, dims: tuple[int, ...], keepdim: bool, *, dtype: torch.dtype | None = None, comms: Comms) -> Tensor:
    """The product over dims some of which are cut."""
    out = x if dtype is None else x.to(dtype)
    for d in sorted(dims, reverse=True):
        out = out.prod(d, keepdim=keepdim)
    for comm in comms:
        out = _Product.apply(out, comm)
    return out


def nanmean_part(
    x: Tensor, dims: tuple[int, ...], keepdim: bool, *, dtype: torch.dtype | None = None, comms: Comms
) -> Tensor:
    """The local part's share of a mean over all elements that are numbers."""
    count = reduce((~x.isnan()).sum(dims, keepdim=keepdim), comms)
    return x.nansum(dims, keepdim=keepdim, dtype=dtype) / count


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, log: bool, comms: Comms) -> Tensor:
        shifted = x - _extreme(x, (dim,), "max", comms)
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


def logsumexp(x: Tensor, dims: tuple[int, ...], keepdim: bool, *, comms: Comms) -> Tensor:
    """Log of the sum of exponentials over dims some of which are cut: complete on every cell."""
    values = wide(x)
    top = _extreme(values, dims, "max", comms)
    out: Tensor = _LogSumExp.apply(values, top.masked_fill(top.abs() == torch.inf, 0), dims, comms)
    return kept(out, dims, keepdim).to(x.dtype)


def scores_and_total(x: Tensor, dim: int, comms: Comms) -> tuple[Tensor, Tensor]:
    """x shifted to a largest value of 0 along `dim`, and the log of the sum of its exponentials, complete."""
    # a shift that is constant along `dim` cancels in every difference, and so carries no gradient
    scores = x - _extreme(x, (dim,), "max", comms)
    total: Tensor = _LogSumExp.apply(scores, scores.new_zeros(()), (dim,), comms)
    return scores, total.squeeze(dim)

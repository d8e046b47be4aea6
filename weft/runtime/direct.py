"""Direct weight gradients: products write the gradients of their weights where these will be summed.

In: the products of a program (`linear`, `addmm`, `embedding`: in a loaded program they stand in place of torch's own,
`stand_ins.py`), in a forward that runs under `Direct`. Out: the same results; in backward the gradient of each weight
that is written for whole by one product, and of the bias beside it, is computed into memory that somebody has for it,
instead of being made elsewhere and copied there. Promised: the kernels are autograd's own, so the bits are too; a
weight that somebody watches (hooks of the user's) takes autograd's own way, and so does everything under autocast,
under a mode of somebody else's, and outside of `Direct`.
"""

from __future__ import annotations

import math
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812


class Write(Protocol):
    """Makes a gradient, in the memory given or in memory of its own; `add`: adds it to what is there."""

    def __call__(self, out: Tensor | None, *, add: bool = False) -> Tensor: ...


class Slots(Protocol):
    """Whoever has memory for gradients."""

    def has_slot(self, parameter: Tensor) -> bool:
        """True if the gradient of a parameter may be written directly."""
        ...

    def write(self, parameter: Tensor, make: Write) -> None:
        """Have an addend of the gradient of a parameter written."""
        ...


@dataclass(frozen=True)
class _Target:
    """A weight whose gradient is written; autograd does not see it."""

    slots: Slots
    parameter: Tensor

    def write(self, make: Write) -> None:
        self.slots.write(self.parameter, make)


class Direct:
    """What a forward runs under whose products write the gradients of weights that have a slot."""

    def __init__(self, slots: Slots, anchor: Tensor) -> None:
        self._slots, self._anchor = slots, anchor
        self._device = anchor.device.type
        self._tokens: list[Token[Direct | None]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_WATCHING.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _WATCHING.reset(self._tokens.pop())

    def is_asked(self) -> bool:
        """True if a product that runs now is to write."""
        # a mode of somebody else's has its own way with products
        others = torch._C._len_torch_function_stack()
        return not others and torch.is_grad_enabled() and not torch.is_autocast_enabled(self._device)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        if weight.dim() != 2 or not self._is_free(input, weight):
            return None
        target, beside, bias = self._targets(weight, bias)
        found: Tensor = _Linear.apply(target, beside, self._anchor, input, weight.detach(), bias)
        return found

    def addmm(self, input: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor | None:
        if input.dim() != 1 or mat1.dim() != 2 or not self._is_free(mat1, mat2):
            return None
        target, beside, bias = self._targets(mat2, input)
        found: Tensor = _Addmm.apply(target, beside, self._anchor, mat1, mat2.detach(), bias)
        return found

    def embedding(self, input: Tensor, weight: Tensor) -> Tensor | None:
        if input.is_floating_point() or not self._is_free(weight, weight):
            return None
        if weight.dtype.itemsize < torch.float32.itemsize:
            # autograd rounds after every row, sums of rows do not
            return None
        found: Tensor = _Embedding.apply(_Target(self._slots, weight), self._anchor, input, weight.detach())
        return found

    def _targets(self, weight: Tensor, bias: Tensor | None) -> tuple[_Target, _Target | None, Tensor | None]:
        """Of the weight, of the bias if its gradient may be written too, and the bias as the product sees it."""
        target = _Target(self._slots, weight)
        if bias is None or bias.dim() != 1 or not self._is_free(weight, bias):
            return target, None, bias
        return target, _Target(self._slots, bias), bias.detach()

    def _is_free(self, input: Tensor, weight: Tensor) -> bool:
        """True if the product may write: nobody else looks at the gradient, and it is an ordinary product."""
        return (
            weight.is_leaf
            and weight.requires_grad
            and weight.is_contiguous()
            and input.dtype == weight.dtype
            and self._slots.has_slot(weight)
        )


_WATCHING: ContextVar[Direct | None] = ContextVar("weft_direct", default=None)
"""What this thread's forward runs under."""


def products_are_watched() -> bool:
    """True if somebody has a way with the products of this thread."""
    return _WATCHING.get() is not None or torch._C._len_torch_function_stack() > 0


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`."""
    watching = _WATCHING.get()
    if watching is not None and watching.is_asked():
        found = watching.linear(input, weight, bias)
        if found is not None:
            return found
    return F.linear(input, weight, bias)


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **kwargs: Any) -> Tensor:
    """`torch.addmm`."""
    watching = _WATCHING.get()
    if watching is not None and not kwargs and watching.is_asked():
        found = watching.addmm(input, mat1, mat2)
        if found is not None:
            return found
    return torch.addmm(input, mat1, mat2, **kwargs)


def embedding(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`F.embedding`."""
    watching = _WATCHING.get()
    if watching is not None and is_plain(*args, **kwargs) and watching.is_asked():
        found = watching.embedding(input, weight)
        if found is not None:
            return found
    return F.embedding(input, weight, *args, **kwargs)


def is_plain(
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> bool:
    """True if the gradient of a table is the sum of its rows' gradients."""
    # a padding_idx of 0 is one
    return padding_idx is None and max_norm is None and not scale_grad_by_freq and not sparse


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        target: _Target,
        beside: _Target | None,
        anchor: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.target, ctx.beside = target, beside
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        rows, seen = _rows(gradient), _rows(x)
        ctx.target.write(_product(rows.t(), seen))
        back = rows.mm(weight).view(x.shape) if ctx.needs_input_grad[3] else None
        return None, None, None, back, None, _of_bias(ctx, rows)


class _Addmm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, target: _Target, beside: _Target | None, anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        ctx.target, ctx.beside = target, beside
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ctx.target.write(_product(x.t(), gradient))
        back = gradient.mm(weight.t()) if ctx.needs_input_grad[3] else None
        return None, None, None, back, None, _of_bias(ctx, gradient)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: _Target, anchor: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
        ctx.target = target
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        rows = _rows(gradient)

        def make(out: Tensor | None, *, add: bool = False) -> Tensor:
            if out is None:
                out = torch.zeros_like(ctx.target.parameter)
            elif not add:
                out.zero_()
            return out.index_add_(0, indices.reshape(-1), rows)

        ctx.target.write(make)
        return None, None, None, None


def _of_bias(ctx: Any, rows: Tensor) -> Tensor | None:
    """The gradient of a bias, for autograd; None if it is written, or nobody wants it."""
    if ctx.beside is not None:
        ctx.beside.write(_sum(rows))
        return None
    return rows.sum(0) if ctx.needs_input_grad[5] else None


def _rows(tensor: Tensor) -> Tensor:
    """As a matrix; a part may be empty, so no size is left to be found."""
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _product(left: Tensor, right: Tensor) -> Write:
    def make(out: Tensor | None, *, add: bool = False) -> Tensor:
        if add:
            assert out is not None, "there is nothing to add to"
            return out.addmm_(left, right)
        return torch.mm(left, right, out=out)

    return make


def _sum(rows: Tensor) -> Write:
    def make(out: Tensor | None, *, add: bool = False) -> Tensor:
        if add:
            assert out is not None, "there is nothing to add to"
            return out.add_(rows.sum(0))
        return rows.sum(0) if out is None else torch.sum(rows, 0, out=out)

    return make

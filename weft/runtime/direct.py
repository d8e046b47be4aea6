"""Direct weight gradients: products write the gradients of their weights where these will be summed.

In: a forward that runs under `Direct`. Out: the same results; in backward the gradient of each weight that is written
for whole by one product (`F.linear`, `torch.addmm`, `F.embedding`) is computed into memory that somebody has for it,
instead of being made elsewhere and copied there. Promised: the kernels are autograd's own, so the bits are too; a
weight that somebody watches (hooks of the user's) takes autograd's own way, and so does everything under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode


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


class Direct(TorchFunctionMode):
    """Watches for products of weights that have a slot."""

    def __init__(self, slots: Slots, anchor: Tensor) -> None:
        super().__init__()
        self._slots, self._anchor = slots, anchor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        make = PRODUCTS.get(func)
        if make is None or not torch.is_grad_enabled() or torch.is_autocast_enabled(self._anchor.device.type):
            return func(*args, **(kwargs or {}))
        found = make(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        if weight.dim() != 2 or not self._is_free(input, weight):
            return None
        found: Tensor = _Linear.apply(_Target(self._slots, weight), self._anchor, input, weight.detach(), bias)
        return found

    def addmm(self, input: Tensor, mat1: Tensor, mat2: Tensor, **kwargs: Any) -> Tensor | None:
        plain = not kwargs and input.dim() == 1 and mat1.dim() == 2
        if not plain or not self._is_free(mat1, mat2):
            return None
        found: Tensor = _Addmm.apply(_Target(self._slots, mat2), self._anchor, mat1, mat2.detach(), input)
        return found

    def embedding(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        told = dict(zip(("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"), args, strict=False))
        told |= kwargs
        # a padding_idx of 0 is one
        if any(told.get(name) is not None for name in ("padding_idx", "max_norm")):
            return None
        if told.get("scale_grad_by_freq") or told.get("sparse"):
            return None
        if input.is_floating_point() or not self._is_free(weight, weight):
            return None
        if weight.dtype.itemsize < torch.float32.itemsize:
            # autograd rounds after every row, sums of rows do not
            return None
        found: Tensor = _Embedding.apply(_Target(self._slots, weight), self._anchor, input, weight.detach())
        return found

    def _is_free(self, input: Tensor, weight: Tensor) -> bool:
        """True if the product may write: nobody else looks at the gradient, and it is an ordinary product."""
        return (
            weight.is_leaf
            and weight.requires_grad
            and weight.is_contiguous()
            and input.dtype == weight.dtype
            and self._slots.has_slot(weight)
        )


PRODUCTS: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: Direct.linear,
    torch.addmm: Direct.addmm,
    F.embedding: Direct.embedding,
}


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: _Target, anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.target = target
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        rows, seen = _rows(gradient), _rows(x)
        ctx.target.write(_product(rows.t(), seen))
        back = rows.mm(weight).view(x.shape) if ctx.needs_input_grad[2] else None
        bias = rows.sum(0) if ctx.needs_input_grad[4] else None
        return None, None, back, None, bias


class _Addmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: _Target, anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.target = target
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ctx.target.write(_product(x.t(), gradient))
        back = gradient.mm(weight.t()) if ctx.needs_input_grad[2] else None
        bias = gradient.sum(0) if ctx.needs_input_grad[4] else None
        return None, None, back, None, bias


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


def _rows(tensor: Tensor) -> Tensor:
    """As a matrix; a part may be empty, so no size is left to be found."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _product(left: Tensor, right: Tensor) -> Write:
    def make(out: Tensor | None, *, add: bool = False) -> Tensor:
        if add:
            assert out is not None, "there is nothing to add to"
            return out.addmm_(left, right)
        return torch.mm(left, right, out=out)

    return make

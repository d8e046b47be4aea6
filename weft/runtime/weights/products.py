"""Products whose weight gradients are written where they are reduced.

In: the products of a program that have a trained parameter as an operand (`linear`, `addmm`, `matmul`, `mm`, `bmm`,
`embedding`), called by the generated text in a forward that runs under `Direct`. Out: the results of torch's functions
of the same names; in backward the gradient of the weight, and of the bias beside it, is computed into memory that the
`Targets` have for it (a bucket, a running sum), or later, if they queue it.

Promised: the kernels are those of autograd, so the bits are too. The product is torch's own, with autograd's gradient,
for a weight with hooks of the user's, under autocast, under a torch function mode, and outside of `Direct`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812


class Write(Protocol):
    """Makes a gradient, in the memory given or in memory of its own; `add`: adds it to what is there."""

    def __call__(self, out: Tensor | None, *, add: bool = False) -> Tensor: ...


Target = Callable[[Write], None]
"""Has an addend of the gradient of one weight made, now or later."""


class Targets(Protocol):
    """Where the gradients of weights go."""

    def target(self, weight: Tensor) -> Target | None:
        """Where that of a weight goes; None: the way of autograd."""
        ...


class Direct:
    """What a forward runs under whose products write the gradients of weights that have a target."""

    def __init__(self, targets: Targets, anchor: Tensor) -> None:
        self._targets, self.anchor = targets, anchor
        self.device = anchor.device.type
        self._tokens: list[Token[Direct | None]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_WATCHING.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _WATCHING.reset(self._tokens.pop())

    def target(self, input: Tensor, weight: Tensor, num_dims: int) -> Target | None:
        """Where the gradient goes; None unless this is an ordinary product of a weight that has a target."""
        ordinary = weight.requires_grad and weight.dim() == num_dims and weight.is_contiguous()
        if not ordinary or input.dtype != weight.dtype or weight.is_complex():
            return None
        return self._targets.target(weight)


_WATCHING: ContextVar[Direct | None] = ContextVar("weft_direct", default=None)
"""What this thread's forward runs under."""


def products_are_watched() -> bool:
    """True if somebody has a way with the products of this thread."""
    return _WATCHING.get() is not None or torch._C._len_torch_function_stack() > 0


def _asked() -> Direct | None:
    """What the products that run now are to write by."""
    found = _WATCHING.get()
    # a mode of somebody else's has its own way with products
    if found is None or torch._C._len_torch_function_stack() or not torch.is_grad_enabled():
        return None
    return None if torch.is_autocast_enabled(found.device) else found


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`."""
    found = _written(input, weight, bias, transposed=True)
    return F.linear(input, weight, bias) if found is None else found


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`torch.addmm`."""
    found = _written(mat1, mat2, input) if beta == alpha == 1 and input.dim() == 1 else None
    return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha) if found is None else found


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """`torch.matmul`."""
    found = _written(input, other)
    return torch.matmul(input, other) if found is None else found


def mm(input: Tensor, mat2: Tensor) -> Tensor:
    """`torch.mm`."""
    found = _written(input, mat2)
    return torch.mm(input, mat2) if found is None else found


def bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """`torch.bmm`."""
    direct = _asked()
    target = None if direct is None else direct.target(input, mat2, 3)
    if direct is None or target is None:
        return torch.bmm(input, mat2)
    found: Tensor = _Bmm.apply(target, direct.anchor, input, mat2.detach())
    return found


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """`F.embedding`."""
    # the gradient of a table is the sum of its rows' gradients only without a row for padding, which 0 may be; and
    # autograd rounds after every row, sums of rows do not
    plain = padding_idx is None and not input.is_floating_point() and weight.dtype.itemsize >= torch.float32.itemsize
    direct = _asked() if plain else None
    target = None if direct is None else direct.target(weight, weight, 2)
    if direct is None or target is None:
        return F.embedding(input, weight, padding_idx)
    found: Tensor = _Embedding.apply(target, direct.anchor, input, weight.detach())
    return found


def _written(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor | None:
    """`input @ weight` (`transposed`: `F.linear`) with a bias of one dim or none; None if it is torch's to do."""
    direct = _asked()
    target = None if direct is None else direct.target(input, weight, 2)
    if direct is None or target is None or (input.dim() < 2 and not transposed):
        return None
    beside = None if bias is None else direct.target(weight, bias, 1)
    if bias is not None and beside is not None:
        bias = bias.detach()
    found: Tensor = _Product.apply(target, beside, direct.anchor, input, weight.detach(), bias, transposed)
    return found


class _Product(torch.autograd.Function):
    """`F.linear`, or, not `transposed`, `x @ weight` with a bias or none."""

    @staticmethod
    def forward(
        ctx: Any,
        target: Target,
        beside: Target | None,
        anchor: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
    ) -> Tensor:
        ctx.target, ctx.beside, ctx.transposed = target, beside, transposed
        # as autograd: a weight that backward does not need may be changed before it
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[3] else None)
        if transposed:
            return F.linear(x, weight, bias)
        if bias is not None:
            return torch.addmm(bias, x, weight)
        # as torch.matmul does it for a weight that has a gradient
        return _rows(x).mm(weight).view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        rows, seen = _rows(gradient), _rows(x)
        ctx.target(_product(rows.t(), seen) if ctx.transposed else _product(seen.t(), rows))
        back = None
        if ctx.needs_input_grad[3]:
            back = rows.mm(weight if ctx.transposed else weight.t()).view(x.shape)
        return None, None, None, back, None, _of_bias(ctx, rows), None


class _Bmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: Target, anchor: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.target = target
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[2] else None)
        return torch.bmm(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ctx.target(_product(x.transpose(1, 2), gradient))
        back = gradient.bmm(weight.transpose(1, 2)) if ctx.needs_input_grad[2] else None
        return None, None, back, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: Target, anchor: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
        ctx.target, ctx.shape = target, weight.shape
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        rows, shape = _rows(gradient), ctx.shape

        def make(out: Tensor | None, *, add: bool = False) -> Tensor:
            if out is None:
                out = rows.new_zeros(shape)
            elif not add:
                out.zero_()
            return out.index_add_(0, indices.reshape(-1), rows)

        ctx.target(make)
        return None, None, None, None


def _of_bias(ctx: Any, rows: Tensor) -> Tensor | None:
    """The gradient of a bias, for autograd; None if it is written, or nobody wants it."""
    if ctx.beside is not None:
        ctx.beside(_sum(rows))
        return None
    return rows.sum(0) if ctx.needs_input_grad[5] else None


def _rows(tensor: Tensor) -> Tensor:
    """As a matrix; a part may be empty, so no size is left to be found."""
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _product(left: Tensor, right: Tensor) -> Write:
    batched = left.dim() == 3

    def make(out: Tensor | None, *, add: bool = False) -> Tensor:
        if out is not None and add:
            return out.baddbmm_(left, right) if batched else out.addmm_(left, right)
        return torch.bmm(left, right, out=out) if batched else torch.mm(left, right, out=out)

    return make


def _sum(rows: Tensor) -> Write:
    def make(out: Tensor | None, *, add: bool = False) -> Tensor:
        if out is not None and add:
            return out.add_(rows.sum(0))
        return rows.sum(0) if out is None else torch.sum(rows, 0, out=out)

    return make

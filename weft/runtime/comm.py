"""Comm: how the cells along the cut axes talk inside one operator, and the differentiable sums built on it.

In: local tensors and the communicators of the cut names. Out: tensors that are equal on all those cells. Two sums
differ only in backward, that is, in what the cells do with the result:

    sum_over      each cell makes its own share of something from it: the gradients are addends, backward sums them
    sum_to_copy   every cell makes the same complete thing from it: each gradient is complete, backward passes it on

Every cell enters the same collectives in the same order, forward and backward, empty parts included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Comm(Protocol):
    """The cells along the axes that cut one name, seen from one of them."""

    @property
    def rank(self) -> int:
        """Position of this cell among them."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Elementwise `sum`, `max` or `min` over the cells: a new tensor, outside autograd."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all cells in order of position; shapes may differ."""
        ...


Comms = Sequence[Comm]
"""The communicators of all names that are cut, in the order of the rule; empty if none is."""


def reduce(x: Tensor, comms: Comms, op: str = "sum") -> Tensor:
    """Reduce over all cells, outside autograd."""
    x = x.detach()
    for comm in comms:
        x = comm.all_reduce(x.contiguous(), op)
    return x


class _Sum(torch.autograd.Function):
    """The sum over some cells; backward sums the gradient over those of `back`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comms: Comms, back: Comms) -> Tensor:
        ctx.back = back
        return reduce(x, comms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce(grad, ctx.back), None, None


def sum_over(x: Tensor, comms: Comms) -> Tensor:
    """The sum over the cells, each of which uses it for its own share of the output."""
    return _Sum.apply(x, comms, comms) if comms else x


def sum_to_copy(x: Tensor, comms: Comms) -> Tensor:
    """The sum over the cells, all of which make the same output of it."""
    return _Sum.apply(x, comms, ()) if comms else x


def wide(x: Tensor) -> Tensor:
    """The tensor in the precision that statistics are computed in: at least float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x

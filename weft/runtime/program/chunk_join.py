"""Chunk join: the results of a loop, from the parts that its chunks give. And the reverse: parts of a tensor.

In: for each result how its parts are put together (`Given`), and what gives those of a chunk. Out: the results. Outside
autograd sums and placements are done in place at once; under it the parts are kept and put together when the loop ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.layout.execute import covers, put, take
from weft.runtime.layout.transfer import Index
from weft.runtime.weights.gradient import Gradient
from weft.runtime.weights.tape import Leaf

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Given:
    """What becomes of one result of a chunk: added up, or placed at its chunk's index of a tensor of that shape."""

    at: tuple[Index, ...] | None = None
    shape: Shape = ()


def join(gives: Sequence[Given], chunks: int, run: Callable[[int], Sequence[Tensor]]) -> list[Tensor]:
    """The results of a loop; `run` gives the parts of a chunk."""
    found = [_Joined(given) for given in gives]
    for chunk in range(chunks):
        for one, part in zip(found, run(chunk), strict=True):
            one.add(chunk, part)
    return [one.result() for one in found]


class _Joined:
    """One result of a loop."""

    def __init__(self, given: Given) -> None:
        self._given, self._private = given, False
        self._total: Tensor | None = None
        self._placed: list[tuple[Index, Tensor]] = []

    def add(self, chunk: int, part: Tensor) -> None:
        """The part of a chunk."""
        if self._given.at is not None:
            self._place(self._given.at[chunk], part)
        elif self._total is None:
            self._total = part
        elif self._private and not torch.is_grad_enabled():
            self._total.add_(part)
        else:
            self._total, self._private = self._total + part, True

    def _place(self, index: Index, part: Tensor) -> None:
        if torch.is_grad_enabled():
            self._placed.append((index, part))
            return
        if self._total is None:
            self._total = part.new_zeros(self._given.shape)
        put(self._total, index, part)

    def result(self) -> Tensor:
        return assemble(self._placed, self._given.shape) if self._total is None else self._total


def assemble(parts: list[tuple[Index, Tensor]], shape: Shape) -> Tensor:
    """One tensor of that shape with the parts at their places, zeros elsewhere. Differentiable."""
    if len(parts) == 1 and covers(parts[0][0], shape):
        return parts[0][1]
    result: Tensor = _Assemble.apply(tuple(index for index, _ in parts), shape, *(part for _, part in parts))
    return result


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: tuple[Index, ...], shape: Shape, *parts: Tensor) -> Tensor:
        ctx.indices = indices
        out = parts[0].new_zeros(shape)
        for index, part in zip(indices, parts, strict=True):
            put(out, index, part)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(take(gradient, index) for index in ctx.indices))


def take_part(whole: Tensor, index: Index, leaf: Leaf | None) -> Tensor:
    """The part at `index`, contiguous. Differentiable; the gradient of a leaf goes to its place in the sum at once,
    so that no whole is made for each part."""
    if covers(index, tuple(whole.shape)):
        return whole
    if leaf is None or not torch.is_grad_enabled():
        return take(whole, index).contiguous()
    part: Tensor = _TakeOfLeaf.apply(whole, index, leaf.sink)
    return part


class _TakeOfLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, index: Index, sink: Gradient) -> Tensor:
        ctx.index, ctx.sink, ctx.shape = index, sink, leaf.shape
        return take(leaf.detach(), index).contiguous().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.sink.add_at(ctx.index, gradient, ctx.shape)
        return None, None, None

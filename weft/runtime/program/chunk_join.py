"""Gives: what a loop leaves behind, from the parts that its bodies give. And takes: parts of a whole, by autograd.

Enters: parts, each to be added to its target or placed at an index of it. Leaves: the targets. Outside autograd sums
and placements are done in place at once; under it the parts are kept and put together when the loop ends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.layout.execute import covers, put, take
from weft.runtime.layout.transfer import Index
from weft.runtime.weights.gradient import Gradient

Shape = tuple[int, ...]


class Gives:
    """Collects the parts given in one run of a loop, target by target."""

    def __init__(self) -> None:
        self._placed: dict[int, list[tuple[Index, Tensor]]] = {}
        self._added: dict[int, Tensor] = {}
        self._shapes: dict[int, Shape] = {}
        self._private: dict[int, Tensor] = {}
        """Results that are ours to write to."""

    def add(self, target: int, part: Tensor) -> None:
        """Add a part to a target."""
        assert target not in self._placed, f"result {target} is given both added and placed parts"
        if target not in self._added:
            self._added[target] = part
        elif torch.is_grad_enabled():
            self._added[target] = self._added[target] + part
        elif target in self._private:
            self._private[target].add_(part)
        else:
            self._private[target] = self._added[target] = self._added[target] + part

    def place(self, target: int, index: Index, shape: Shape, part: Tensor) -> None:
        """Put a part at an index of a target of that shape."""
        assert target not in self._added, f"result {target} is given both added and placed parts"
        self._shapes[target] = shape
        parts = self._placed.setdefault(target, [])
        if torch.is_grad_enabled():
            parts.append((index, part))
        else:
            if target not in self._private:
                self._private[target] = part.new_zeros(shape)
            put(self._private[target], index, part)

    def results(self, count: int) -> list[Tensor]:
        """The first so many targets."""
        found = []
        for target in range(count):
            if target in self._private:
                found.append(self._private[target])
            elif target in self._added:
                found.append(self._added[target])
            else:
                found.append(assemble(self._placed[target], self._shapes[target]))
        return found


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


def take_part(whole: Tensor, index: Index, sink: Gradient | None) -> Tensor:
    """The part at `index`, contiguous. Differentiable; the gradient of a leaf goes to its place in the sum at once,
    so that no whole is made for each part."""
    if covers(index, tuple(whole.shape)):
        return whole
    if sink is None or not torch.is_grad_enabled():
        return take(whole, index).contiguous()
    part: Tensor = _TakeOfLeaf.apply(whole, index, sink)
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

"""Gives: what a loop leaves behind, from the parts that its bodies give. And takes: parts of a whole, by autograd.

Enters: parts, each to be added to its target or placed at an index of it. Leaves: the targets. Outside autograd sums
and placements are done in place at once; under it the parts are kept and put together when the loop ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.script import Give, Index
from weft.runtime.transfers import covers, put, take
from weft.runtime.values import Gradient

Shape = tuple[int, ...]


class Gives:
    """Collects the parts given in one run of a loop. `keep`: do not combine them (each is a root of backward)."""

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._placed: dict[str, list[tuple[Index, Tensor]]] = {}
        self._added: dict[str, list[Tensor]] = {}
        self._shapes: dict[str, Shape] = {}
        self._private: dict[str, Tensor] = {}
        """Results that are ours to write to."""

    def give(self, step: Give, part: Tensor) -> None:
        sort = self._placed if step.index is None else self._added
        assert step.target not in sort, f"{step.target} is given both added and placed parts"
        self._shapes[step.target] = step.shape
        if step.index is None:
            self._add(step.target, part)
        elif self._keep or torch.is_grad_enabled():
            self._placed.setdefault(step.target, []).append((step.index, part))
        else:
            if step.target not in self._private:
                self._placed[step.target] = []
                self._private[step.target] = part.new_zeros(step.shape)
            put(self._private[step.target], step.index, part)

    def _add(self, target: str, part: Tensor) -> None:
        parts = self._added.setdefault(target, [])
        if not parts or self._keep:
            parts.append(part)
        elif torch.is_grad_enabled():
            parts[0] = parts[0] + part
        elif target in self._private:
            self._private[target].add_(part)
        else:
            self._private[target] = parts[0] = parts[0] + part

    def results(self, keys: tuple[str, ...]) -> dict[str, Tensor]:
        """The targets among `keys` that were given something."""
        found = {}
        for key in keys:
            if key in self._private:
                found[key] = self._private[key]
            elif key in self._added:
                found[key] = self._added[key][0]
            elif key in self._placed:
                found[key] = assemble(self._placed[key], self._shapes[key])
        return found

    def parts(self) -> Iterator[tuple[str, Index | None, Tensor]]:
        """Target, index in it (None: added) and part of everything given."""
        for target, added in self._added.items():
            for part in added:
                yield target, None, part
        for target, placed in self._placed.items():
            for index, part in placed:
                yield target, index, part


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

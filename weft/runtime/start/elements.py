"""Elements: where the elements of a tensor lie, a few at a time.

In: a tensor as a place in a storage (`At`), a part of it (`Index`), and a range of the part's elements in row-major
order. Out: int64 tensors: offsets in the storage, positions in the tensor. Nothing of the size of a tensor is made.
All results have CHUNK elements, the last of a part again and again at its end: what is computed from them takes the
same way through the kernels wherever an element stands, and so comes out the same to the bit under every cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.runtime.layout.execute import size
from weft.runtime.layout.indices import indices
from weft.runtime.layout.transfer import Index
from weft.runtime.start.record import At

CHUNK = 1 << 15
"""Torch computes as many elements in one thread, whatever the number of its threads."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in row-major order.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_contiguous(at: At) -> bool:
    """True if positions are offsets."""
    plain = contiguous_strides(at.size)
    return all(mine == other or length == 1 for mine, other, length in zip(at.stride, plain, at.size, strict=True))


class PartOffsets:
    """Offsets, in its storage, of the elements of a part of a tensor."""

    def __init__(self, at: At, index: Index) -> None:
        self.shape = size(index)
        self.num_elements = math.prod(self.shape)
        self._at = at
        first = index[0][0][0] if index and len(index[0]) == 1 else None
        whole = all(one == ((0, length),) for one, length in zip(index[1:], at.size[1:], strict=True))
        self._run = at.offset + first * at.stride[0] if first is not None and whole and is_contiguous(at) else None
        """Where the part lies, if it lies in one run."""
        self._maps = [indices(intervals) * stride for intervals, stride in zip(index, at.stride, strict=True)]

    def chunk(self, start: int) -> Tensor:
        """Those from the element `start` of the part on."""
        local = torch.arange(start, start + CHUNK).clamp_(max=self.num_elements - 1)
        if self._run is not None:
            return local.add_(self._run)
        found = torch.full((CHUNK,), self._at.offset)
        for dim, step in reversed(list(enumerate(contiguous_strides(self.shape)))):
            if self.shape[dim] > 1:
                found += self._maps[dim][(local // step) % self.shape[dim]]
            else:
                found += self._maps[dim]
        return found


def positions(at: At, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Row-major positions in a tensor of elements of its storage, and which of them it has.

    Positions of those that it has not are some that it has."""
    rest = offsets - at.offset
    if is_contiguous(at):
        last = math.prod(at.size) - 1
        return rest.clamp(0, last), (rest >= 0) & (rest <= last)
    found, inside = torch.zeros_like(offsets), torch.ones_like(offsets, dtype=torch.bool)
    plain = contiguous_strides(at.size)
    dims = [dim for dim in range(len(at.size)) if at.size[dim] > 1]
    for dim in sorted(dims, key=lambda dim: -at.stride[dim]):
        here = rest.div(at.stride[dim], rounding_mode="floor")
        inside &= (here >= 0) & (here < at.size[dim])
        here.clamp_(0, at.size[dim] - 1)
        rest = rest - here * at.stride[dim]
        found += here * plain[dim]
    return found, inside & (rest == 0)


def offsets_at(at: At, position: Tensor, shape: Sequence[int]) -> Tensor:
    """Offsets of the elements of a tensor that a result of that shape has at these positions. It is broadcast."""
    if at.size == tuple(shape) and is_contiguous(at):
        return position + at.offset
    found = torch.full_like(position, at.offset)
    plain, skipped = contiguous_strides(shape), len(shape) - len(at.size)
    for dim, (length, stride) in enumerate(zip(at.size, at.stride, strict=True)):
        if length > 1:
            found += (position // plain[dim + skipped]) % length * stride
    return found

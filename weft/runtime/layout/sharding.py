"""Shardings: how tensors that travel in one collective are cut over the members of a group.

In: shapes of the wholes, and what each member has of them. Out: what a collective asks of that. A sharding is made once
for each bucket of a program and used in every step, so all of it is worked out once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from weft.runtime.layout.index import Shape, covers, size
from weft.runtime.layout.transfer import Index

Parts = tuple[Index | None, ...]
"""Of one tensor, the part of each member, in group order; None: nothing."""
ALIGNED = 64
"""Bytes: tensors begin where vector instructions like it."""


@dataclass(frozen=True, eq=False)
class Sharding:
    """Tensors of one dtype of which the members of a group have parts.

    Args:
        shapes: of each whole.
        parts: of each.
        mine: the shape of this rank's shard of each, without elements where it has nothing.
    """

    shapes: Sequence[Shape]
    parts: Sequence[Parts]
    mine: Sequence[Shape]
    dtype: torch.dtype
    _orders: dict[torch.device, Tensor] = field(default_factory=dict)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each whole."""
        return tuple(map(math.prod, self.shapes))

    @cached_property
    def aligned_lengths(self) -> tuple[int, ...]:
        """The same with what is left free behind each."""
        return tuple(aligned(length, self.dtype) for length in self.lengths)

    @property
    def nbytes(self) -> int:
        """Of the wholes."""
        return sum(self.lengths) * self.dtype.itemsize

    @cached_property
    def shard_lengths(self) -> tuple[int, ...]:
        """Elements of this rank's shard of each."""
        return tuple(map(math.prod, self.mine))

    @cached_property
    def runs(self) -> tuple[tuple[tuple[int, Index, Shape], ...], ...]:
        """For each member the tensors that it has parts of: which, and the part and its shape."""
        pairs = [list(enumerate(one[at] for one in self.parts)) for at in range(len(self.parts[0]))]
        return tuple(tuple((at, part, size(part)) for at, part in each if part is not None) for each in pairs)

    @cached_property
    def most(self) -> int:
        """Elements of the parts of the member that has most."""
        return max(sum(math.prod(shape) for _, _, shape in each) for each in self.runs)

    @cached_property
    def in_rows(self) -> bool:
        """True if each member has as many rows of each tensor as every other, the first member the first ones."""
        return all(self.lengths) and all(map(_in_rows, self.shapes, self.parts))

    @cached_property
    def run(self) -> int:
        """Elements of which the shard of each tensor is a multiple, if they are in rows and lie without gaps; 0 if
        these are too few to be moved by themselves."""
        found = math.gcd(*self.shard_lengths)
        few = found * self.dtype.itemsize < ALIGNED or self.aligned_lengths != self.lengths
        return 0 if few else found

    def order(self, device: torch.device) -> Tensor:
        """Where in the members' runs, end to end, each run of the wholes is."""
        if device not in self._orders:
            counts = [length // self.run for length in self.shard_lengths]
            starts, members = list(accumulate(counts, initial=0)), len(self.parts[0])
            each = [
                torch.arange(starts[-1] * member + start, starts[-1] * member + start + count)
                for start, count in zip(starts[:-1], counts, strict=True)
                for member in range(members)
            ]
            self._orders[device] = torch.cat(each).to(device)
        return self._orders[device]


def _in_rows(shape: Shape, parts: Parts) -> bool:
    rows, left = divmod(shape[0], len(parts)) if shape else (0, 1)
    wanted = [((at * rows, (at + 1) * rows),) for at in range(len(parts))]
    return not left and all(
        part is not None and part[0] == rows_of and covers(part[1:], shape[1:])
        for part, rows_of in zip(parts, wanted, strict=True)
    )


def aligned(numel: int, dtype: torch.dtype) -> int:
    """Elements that a tensor takes, so that the next one begins where it is best read."""
    step = max(1, ALIGNED // dtype.itemsize)
    return -(-numel // step) * step

"""Buckets: which tensors travel in one collective, and how many bytes.

In: tensors in the order of the program, each with its group and dtype. Out: lists of those that share both, in the
order of their last members: that is when they can be started. It is the same on all members of a group.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

import torch

BUCKET = 32 << 20
"""Bytes of gradients in one all-reduce."""
FULL = 4 << 20
"""Bytes of full gradients in one reduce-scatter, and of kept weights in one all-gather."""
AHEAD = 1 << 20
"""Bytes of weights in one all-gather ahead of their use: what comes too early leaves the cache before it is used."""

WORTH = 1 << 20
"""Bytes from which on tensors travel together: if there are less in all they go one by one, in memory that fits."""


def bucket_size(total: int, size: int) -> int:
    """Bytes of a bucket, up to `size`, of tensors that have so many in all."""
    return size if total >= WORTH else 0


ALIGNED = 64
"""Bytes: tensors begin where vector instructions like it."""


class Travels(Protocol):
    """A tensor that travels."""

    @property
    def key(self) -> Hashable:
        """What all tensors of a bucket have in common."""
        ...

    @property
    def num_bytes(self) -> int: ...


T = TypeVar("T", bound=Travels)


def in_buckets(tensors: Sequence[T], size: int) -> list[list[T]]:
    """A tensor as large as a bucket is its own; smaller ones share one until it is full, also if others stand between
    them."""
    made: list[tuple[int, list[T]]] = []
    unfilled: dict[Hashable, list[T]] = {}
    for place, one in enumerate(tensors):
        bucket = [one] if one.num_bytes >= size else [*unfilled.pop(one.key, ()), one]
        if sum(each.num_bytes for each in bucket) >= size:
            made.append((place, bucket))
        else:
            unfilled[one.key] = bucket
    last = {id(one): place for place, one in enumerate(tensors)}
    made += [(last[id(bucket[-1])], bucket) for bucket in unfilled.values()]
    return [bucket for _, bucket in sorted(made, key=lambda pair: pair[0])]


def aligned(numel: int, dtype: torch.dtype) -> int:
    """Elements that a tensor takes, so that the next one begins where it is best read."""
    step = max(1, ALIGNED // dtype.itemsize)
    return -(-numel // step) * step

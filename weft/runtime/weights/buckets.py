"""Buckets: which tensors travel in one collective, and how many bytes.

In: tensors in the order of the program, each with its group and dtype. Out: lists of those that share both, in the
order of their last members: that is when they can be started. It is the same on all members of a group.

On devices (`Transport.by_block`) weights that are stored in shards, and their gradients, travel by block of the model
instead (`Blocks`), as people shard it by hand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

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


BLOCK = 256 << 20
"""Bytes of a block above which numbers further along the path divide it, if there are any."""


class Travels(Protocol):
    """A tensor that travels."""

    @property
    def name(self) -> str:
        """Of the parameter."""
        ...

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


@dataclass(frozen=True)
class Blocks:
    """Which parameters travel together where a call costs more than the bytes that it waits for: those of a block of
    the model, which is what lies under one numbered path. What has no number goes with its neighbours.

    Args:
        of: the block of each parameter that has one.
    """

    of: Mapping[str, str]

    @staticmethod
    def among(num_bytes: Mapping[str, int]) -> Blocks:
        """Those of a model, of the names and whole sizes of its parameters: the same on all ranks.

        >>> Blocks.among({"embed": 8, "layers.0.norm": 8, "layers.0.experts.1": 8, "layers.1.norm": 8}).of
        {'layers.0.norm': 'layers.0', 'layers.0.experts.1': 'layers.0', 'layers.1.norm': 'layers.1'}
        """
        found: dict[str, str] = {}
        left = {name: list(_numbered(name)) for name in num_bytes}
        while left := {name: paths for name, paths in left.items() if paths}:
            total: dict[str, int] = defaultdict(int)
            for name, paths in left.items():
                found[name] = paths.pop(0)
                total[found[name]] += num_bytes[name]
            left = {name: paths for name, paths in left.items() if total[found[name]] > BLOCK}
        return Blocks(found)

    def first(self, tensors: Iterable[T]) -> list[T]:
        """The first of them, up to where another block begins."""
        found: list[T] = []
        current = ""
        for one in tensors:
            block = self.of.get(one.name, current)
            if current and block != current:
                break
            current = block
            found.append(one)
        return found

    def split(self, tensors: Sequence[T]) -> list[list[T]]:
        """All of them, in one list for each block and key."""
        found: list[list[T]] = []
        while tensors:
            together = self.first(tensors)
            found += by_key(together)
            tensors = tensors[len(together) :]
        return found


def _numbered(name: str) -> Iterator[str]:
    """The paths that end in a number, from the first on."""
    paths = accumulate(name.split("."), lambda path, part: f"{path}.{part}")
    return (path for path in paths if path.rpartition(".")[2].isdigit())


def by_key(tensors: Iterable[T]) -> list[list[T]]:
    """Those that share group and dtype together."""
    found: dict[Hashable, list[T]] = defaultdict(list)
    for one in tensors:
        found[one.key].append(one)
    return list(found.values())

"""Bucketed: how the tensors of a bucket lie in what a collective of a device sends and gives.

In: what came of all members, or a sum, flat; how the bucket is cut (`Sharding`). Out: wholes, or shards, in as few
kernels as there can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.runtime.layout.index import narrowed, put
from weft.runtime.layout.sharding import Sharding
from weft.runtime.links.transport import Group, as_shards


def rows_of(came: Tensor, group: Group) -> list[Tensor]:
    """What came of each member, in group order."""
    at = {peer: row for row, peer in enumerate(sorted(group))}
    found = came.view(len(group), came.numel() // len(group)).unbind()
    return [found[at[peer]] for peer in group]


def wholes_of(flat: Tensor, sharding: Sharding) -> list[Tensor]:
    """A flat tensor as wholes: they come together, and go one soon after the other."""
    pieces: Sequence[Tensor] = flat.split_with_sizes(sharding.aligned_lengths)
    if sharding.aligned_lengths != sharding.lengths:
        pieces = [piece[:length] for piece, length in zip(pieces, sharding.lengths, strict=True)]
    each = zip(pieces, sharding.shapes, strict=True)
    return [piece if len(shape) == 1 else piece.view(shape) for piece, shape in each]


@torch.no_grad()
def fill_rows(full: list[Tensor], sharding: Sharding, came: Tensor) -> list[Tensor]:
    """Each whole from the members' rows, in one operator."""
    members = came.shape[0]
    sizes = [length // members for length in sharding.lengths]
    torch.split_with_sizes_copy(came, sizes, 1, out=[one.view(members, -1) for one in full])
    return full


@torch.no_grad()
def fill(full: list[Tensor], sharding: Sharding, rows: Sequence[Tensor]) -> list[Tensor]:
    """Each whole from the members' runs, in as few kernels as there can be."""
    views, sources = list[Tensor](), list[Tensor]()
    for runs, row in zip(sharding.runs, rows, strict=True):
        pieces = row.split_with_sizes(_lengths([shape for _, _, shape in runs], row.numel()))
        for (at, part, shape), piece in zip(runs, pieces, strict=False):
            view = narrowed(full[at], part)
            if view is None:
                put(full[at], part, piece.view(shape))
            else:
                views.append(view)
                sources.append(piece.view(shape))
    if views:
        torch._foreach_copy_(views, sources)
    return full


def _lengths(shapes: Sequence[tuple[int, ...]], total: int) -> list[int]:
    """Elements of each, and how many more there are."""
    lengths = list(map(math.prod, shapes))
    return [*lengths, total - sum(lengths)]


def shards_of(total: Tensor, sharding: Sharding) -> list[Tensor]:
    """A sum, as the shards that it is of."""
    length = sum(sharding.shard_lengths)
    return as_shards(total if total.numel() == length else total[:length], sharding)

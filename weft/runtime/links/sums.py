"""Sums over the members of a group, by exchanges of bytes and local addition in group order.

In: this rank's flat tensor and where the total goes (which may be the same memory). Out: nothing: the total is there,
and equal bit for bit on all members, for every number of blocks. A tensor travels in blocks; while one block is under
way the one before is added up. With two members, or little data, a block goes round once: everybody's to everybody.
With more it goes round twice: each member gets and adds its chunk of the block, then sends the sum to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.runtime.links.transport import Group, combine

if TYPE_CHECKING:
    from weft.runtime.links.channel import Channel

BLOCK = 4 << 20
"""Bytes of a block: large enough for the rate of a long message, small enough to stay in the cache."""
CHUNK = 1 << 20
"""Bytes of a block that one member adds up, at most: they travel in one piece of shared memory (`shm/segments.py`).
Blocks under way would wait for each other's second pieces, and share the buffers that those are read from."""
ONE_ROUND = 1 << 16
"""Bytes up to which a sum over more than two members goes round once: below, the second round costs more than the
bytes that it saves (gloo, 4 processes of one host)."""


def add_up(channel: Channel, source: Tensor, total: Tensor, group: Group, op: str) -> None:
    """Fill `total` with the combination of all members' `source`; both are flat, and may be the same memory."""
    rounds = _one_round if len(group) <= 2 or source.nbytes <= ONE_ROUND else _two_rounds
    size = BLOCK if rounds is _one_round else min(BLOCK, CHUNK * len(group))
    length = max(1, size // source.itemsize)
    whole = len(source) <= length
    pairs = [(source, total)] if whole else zip(source.split(length), total.split(length), strict=True)
    blocks = [rounds(channel, mine, into, group, op, f"{k % 2}") for k, (mine, into) in enumerate(pairs)]
    # one block begins, the one before is added up, the one before that ends: in this order on all members
    for newest in range(len(blocks) + 2):
        for k in (newest, newest - 1, newest - 2):
            if 0 <= k < len(blocks):
                next(blocks[k], None)


def _one_round(channel: Channel, mine: Tensor, into: Tensor, group: Group, op: str, slot: str) -> Iterator[None]:
    """A block that goes from everybody to everybody, and is added up where it lies."""
    members, sent = sorted(group), mine.view(torch.uint8)
    sizes = [0 if peer == channel.rank else sent.numel() for peer in members]
    end = channel.begin_look(sent, sizes, group)
    yield
    came, release = end()
    by_rank = dict(zip(members, came, strict=True))
    parts = [mine if peer == channel.rank else by_rank[peer].view(mine.dtype) for peer in group]
    if len(group) <= 2:
        combine(parts, op, into)
    else:
        into.copy_(combine(parts, op))
    release()


def _two_rounds(channel: Channel, mine: Tensor, into: Tensor, group: Group, op: str, slot: str) -> Iterator[None]:
    """A block of which each member adds up its own chunk. `slot`: which of two sets of buffers it uses."""
    members = sorted(group)
    lengths = [len(chunk) for chunk in mine.tensor_split(len(group))]
    sizes = [length * mine.itemsize for length in lengths]
    own = members.index(channel.rank)
    alike = [sizes[own]] * len(group)
    came = channel.scratch(f"came{slot}", sum(alike))
    end = channel.begin_carry(came, mine.view(torch.uint8), alike, sizes, group)
    yield
    end()
    chunks = dict(zip(members, came.view(mine.dtype).view(len(group), lengths[own]), strict=True))
    chunk = combine([chunks[peer] for peer in group], op, chunks[group[0]])
    end = channel.begin_carry(into.view(torch.uint8), chunk.view(torch.uint8), sizes, alike, group, same=True)
    yield
    end()

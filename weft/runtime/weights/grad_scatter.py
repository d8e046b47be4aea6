"""Scattering gradients: full gradients are reduced to the shards that ranks store, several at a time, during backward.

In: gradients that every member of a group has an addend of, posted in one order on all of them, and word that no more
will come. Out: this rank's shard of each sum. What is posted gathers in buckets by group and dtype; a full bucket is
started, and waited for before the next one is.

Promised: one bucket is under way at a time, and of large gradients one, so no more full gradients than these are kept;
sums are added in group order, so the bits do not depend on the buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.runtime.layout.index import covers
from weft.runtime.layout.sharding import Parts, Sharding, aligned
from weft.runtime.layout.transfer import Transfer
from weft.runtime.links.transport import Doing, Group, Handle, Transport, listed
from weft.runtime.weights.buckets import Blocks

MOST = 32 << 20
"""Bytes of full gradients under way and the next one's together, unless that is more by itself."""
SHARED = 2 << 20
"""Bytes of memory that gradients share; a larger one has its own."""
ENDLESS = 1 << 62
"""Bytes of a bucket that is started for another reason than its size."""

Deliver = Callable[[str, Tensor], None]


@dataclass
class _Bucket:
    """Gradients that go together. `full`: until it is started."""

    group: Group
    names: list[str] = field(default_factory=list)
    full: list[tuple[Tensor, Transfer]] = field(default_factory=list)
    num_bytes: int = 0
    handle: Handle[list[Tensor]] | None = None


class Scatter:
    """The full gradients of one module on their way.

    Args:
        deliver: gets each shard, which is the receiver's to write to.
        bucket: bytes of one.
        blocks: a bucket is a block of the model instead.
    """

    def __init__(self, transport: Transport, deliver: Deliver, *, bucket: int, blocks: Blocks | None = None) -> None:
        self._transport, self._deliver, self._blocks = transport, deliver, blocks
        self._size, self._block = bucket if blocks is None else ENDLESS, ""
        self._open: dict[tuple[Group, torch.dtype], _Bucket] = {}
        self._started: _Bucket | None = None
        self._shared: dict[tuple[Group, torch.dtype], tuple[Tensor, int]] = {}
        """Memory in which the next gradients may lie, and how much of it is taken."""
        self._shardings: dict[tuple[Any, ...], tuple[list[Transfer], Sharding]] = {}
        """By the identity of transfers, which it holds: no other object gets that."""

    @staticmethod
    def takes(transfers: Sequence[Transfer]) -> bool:
        """True if a gradient goes that way."""
        if len(transfers) != 1 or transfers[0].kind != "reduce_scatter" or len(transfers[0].shapes) != 1:
            return False
        (transfer,) = transfers
        return transfer.add and all(covers(piece.index, transfer.shapes[0]) for piece in transfer.receives)

    def buffer(self, shape: torch.Size, dtype: torch.dtype, transfer: Transfer) -> Tensor:
        """Where a gradient is best written to."""
        numel, most = prod(shape), min(SHARED, self._size) // dtype.itemsize
        if self._started is not None and self._started.num_bytes + numel * dtype.itemsize > MOST:
            self._wait()
        if numel >= most:
            return self._transport.buffer(numel, dtype, transfer.group, brief=True).view(shape)
        key = transfer.group, dtype
        start = self._shared[key][1] if key in self._shared else most
        if start + numel > most:
            # first let go of the last one: it may be the one that comes
            self._shared.pop(key, None)
            self._shared[key], start = (self._transport.buffer(most, dtype, transfer.group, brief=True), 0), 0
        memory = self._shared[key][0]
        self._shared[key] = memory, start + aligned(numel, dtype)
        return memory[start : start + numel].view(shape)

    def post(self, name: str, full: Tensor, transfer: Transfer) -> None:
        """Let a gradient go. It may not be written to any more."""
        if self._blocks is not None:
            self._enter(self._blocks.of.get(name, self._block))
        key = transfer.group, full.dtype
        bucket = self._open.setdefault(key, _Bucket(transfer.group))
        bucket.names.append(name)
        bucket.full.append((full, transfer))
        bucket.num_bytes += full.nbytes
        if bucket.num_bytes >= self._size:
            self._start(self._open.pop(key))
            if not self._size:
                # one by one: nothing is to be held while the next is made
                self._wait()

    def _enter(self, block: str) -> None:
        """The next gradient is of this block; what has come before, if it has one, is complete."""
        if self._block and block != self._block:
            self._start_all()
        self._block = block

    def finish(self) -> None:
        """Start what is left, and wait for all."""
        self._start_all()
        self._block = ""
        self._wait()
        self._shared.clear()

    def drop(self) -> None:
        """Forget what was posted and not started."""
        self._open, self._block = {}, ""
        self._shared.clear()
        self._wait()

    def _start_all(self) -> None:
        while self._open:
            self._start(self._open.pop(next(iter(self._open))))

    def _start(self, bucket: _Bucket) -> None:
        self._wait()
        transport = self._transport
        before, transport.doing = transport.doing, Doing(f"gradient sync of {listed(bucket.names)}")
        full = [one for one, _ in bucket.full]
        bucket.handle = transport.start_reduce_scatter(full, self._sharding(bucket.full), bucket.group)
        # whoever carries them out holds them as long as they are needed
        bucket.full = []
        self._started = bucket
        transport.doing = before

    def _sharding(self, full: Sequence[tuple[Tensor, Transfer]]) -> Sharding:
        """How gradients that go together are cut: the same ones do so in every step."""
        key = (full[0][0].dtype, *(id(transfer) for _, transfer in full))
        if key not in self._shardings:
            transfers = [transfer for _, transfer in full]
            parts = [_parts(transfer) for transfer in transfers]
            shapes, mine = [tuple(one.shape) for one, _ in full], [transfer.shapes[0] for transfer in transfers]
            self._shardings[key] = transfers, Sharding(shapes, parts, mine, full[0][0].dtype)
        return self._shardings[key][1]

    def _wait(self) -> None:
        bucket, self._started = self._started, None
        if bucket is not None and bucket.handle is not None:
            for name, shard in zip(bucket.names, bucket.handle.wait(), strict=True):
                self._deliver(name, shard)


def _parts(transfer: Transfer) -> Parts:
    parts = {piece.peer: piece.index for piece in transfer.sends}
    return tuple(parts.get(peer) for peer in transfer.group)

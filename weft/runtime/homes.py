"""Homes: whole gradients on their way to where their parts are stored, several at a time, while backward goes on.

In: gradients that every member of a group has an addend of, posted in one order on all of them, and word that no more
will come. Out: this rank's part of each sum, those of a name in the order of posting. What is posted gathers in buckets
by group and dtype; a full one is started in the second lane of the transport. Among processes of one host a
gradient lies in memory that all see (`room`, where products write it), and each adds up its own part where the others'
lie; elsewhere parts are exchanged, and added here. Either way in group order, so the bits are those of one transfer
after the other.
Nothing goes so in the first step, in which gradients wait for its end, nor where it was little (`count`).

Promised: no more than `AHEAD` buckets are under way, and of large gradients one, so no more wholes than these are kept.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import Tensor

from weft.runtime.rooms import WORTH, Rooms, of_job, rooms_for
from weft.runtime.script import Index, Transfer
from weft.runtime.shared_parts import add_parts
from weft.runtime.spares import Spares
from weft.runtime.sums import combine
from weft.runtime.transfers import Arriving, Exchanges, covers, take
from weft.runtime.transport import Doing, Expected, Transport, listed

BUCKET = 4 << 20
"""Bytes of a bucket."""
AHEAD = 1
"""Buckets under way: more would hold more wholes, and each rank computes meanwhile anyway."""
ROOM = 2 << 20
"""Bytes of rooms that gradients share; what is larger has its own."""
MOST = 32 << 20
"""Bytes of whole gradients under way and the next one's together, unless that is more by itself."""
KIND = "reduce_scatter"

Deliver = Callable[[str, Tensor], None]


@dataclass
class _Posted:
    """A gradient under way; `part` is filled when the bucket it is in has come."""

    name: str
    bucket: _Bucket | None
    part: Tensor | None = None


@dataclass
class _Bucket:
    """Gradients that go together. `whole`: until it is started."""

    group: tuple[int, ...]
    posted: list[_Posted] = field(default_factory=list)
    whole: list[tuple[Tensor, Transfer]] = field(default_factory=list)
    size: int = 0
    """Bytes, when it was started."""
    come: Callable[[], Sequence[Tensor]] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor, _ in self.whole)


class Homes:
    """The gradients of one module on their way.

    Args:
        deliver: gets each part, which is the receiver's to write to.
    """

    def __init__(self, transport: Transport, deliver: Deliver, *, bucket: int = BUCKET) -> None:
        self._transport, self._deliver, self._size = transport, deliver, bucket
        self._open: dict[tuple[tuple[int, ...], torch.dtype], _Bucket] = {}
        self._started: deque[_Bucket] = deque()
        self._posted: deque[_Posted] = deque()
        self._rooms: dict[tuple[int, ...], Rooms | None] = {}
        self._num_bytes: Counter[tuple[int, ...]] = Counter()
        """What went in the first step, by group."""
        self._is_first = True
        self._spares = Spares(0)
        """Memory of parts."""

    def takes(self, transfers: Sequence[Transfer]) -> bool:
        """True if a gradient can go that way."""
        if len(transfers) != 1 or transfers[0].kind != KIND or not isinstance(self._transport, Exchanges):
            return False
        (transfer,) = transfers
        shape = transfer.shapes[0]
        plain = all(covers(piece.index, shape) for piece in transfer.receives)
        return plain and transfer.add and len(transfer.shapes) == 1 and can_start(self._transport)

    def room(self, shape: torch.Size, dtype: torch.dtype, transfer: Transfer) -> Tensor | None:
        """Where a gradient is best written to; None if that is all the same."""
        rooms = self._rooms_of(transfer.group) if self.is_open(transfer) else None
        if rooms is None:
            return None
        self._make_way(prod(shape) * dtype.itemsize)
        return rooms.take(shape, dtype)

    def is_open(self, transfer: Transfer) -> bool:
        """True if gradients are to go that way now."""
        return not self._is_first and self._num_bytes[transfer.group] >= WORTH

    def count(self, whole: Tensor, transfer: Transfer) -> None:
        """A gradient that went another way."""
        if self._is_first:
            self._num_bytes[transfer.group] += whole.nbytes

    def post(self, name: str, whole: Tensor, transfer: Transfer) -> None:
        """Let a gradient go. It may not be written to any more."""
        key = transfer.group, whole.dtype
        bucket = self._open.setdefault(key, _Bucket(transfer.group))
        bucket.posted.append(_Posted(name, bucket))
        bucket.whole.append((whole, transfer))
        self._posted.append(bucket.posted[-1])
        if bucket.num_bytes >= self._size:
            del self._open[key]
            self._start(bucket)

    def put(self, name: str, part: Tensor) -> None:
        """A part that is complete; it is delivered in its turn among those of its name."""
        if all(one.name != name for one in self._posted):
            self._deliver(name, part)
            return
        self._posted.append(_Posted(name, None, part))
        self._hand_out()

    def finish(self) -> None:
        """Start what is left, and wait for all."""
        for bucket in self._open.values():
            self._start(bucket)
        self._open = {}
        while self._started:
            self._wait()
        for rooms in filter(None, self._rooms.values()):
            rooms.leave()
        self._is_first = self._is_first and not self._num_bytes

    def drop(self) -> None:
        """Forget what was posted and not started."""
        self._open = {}
        while self._started:
            self._wait()
        self._posted.clear()

    def _rooms_of(self, group: tuple[int, ...]) -> Rooms | None:
        if group not in self._rooms:
            self._rooms[group] = rooms_for(self._transport, group, ROOM, brief=True)
        return self._rooms[group]

    def _start(self, bucket: _Bucket) -> None:
        while len(self._started) >= AHEAD:
            self._wait()
        before = self._transport.doing
        self._transport.doing = Doing(f"gradient sync of {listed([one.name for one in bucket.posted])}")
        rooms = self._rooms_of(bucket.group)
        bucket.come = self._exchanged(bucket) if rooms is None else self._shared(bucket, rooms)
        # whoever carries them out holds them as long as they are needed
        bucket.size, bucket.whole = bucket.num_bytes, []
        self._started.append(bucket)
        self._transport.doing = before

    def _make_way(self, num_bytes: int) -> None:
        """Wait until another gradient may be made."""
        while self._started and sum(one.size for one in self._started) + num_bytes > MOST:
            self._wait()

    def _wait(self) -> None:
        bucket = self._started.popleft()
        assert bucket.come is not None
        for posted, part in zip(bucket.posted, bucket.come(), strict=True):
            posted.part, posted.bucket = part, None
        self._hand_out()

    def _hand_out(self) -> None:
        while self._posted and self._posted[0].bucket is None:
            posted = self._posted.popleft()
            assert posted.part is not None
            self._deliver(posted.name, posted.part)

    def _shared(self, bucket: _Bucket, rooms: Rooms) -> Callable[[], Sequence[Tensor]]:
        """Begin to add up where the gradients lie."""
        lent = [rooms.lent(tensor, _parts(transfer)) for tensor, transfer in bucket.whole]
        into = self._memory([transfer.shapes[0] for _, transfer in bucket.whole], lent[0].tensor)
        alike = torch.empty(sum(one.tensor.numel() for one in lent), dtype=into[0].dtype, device="meta")
        handle = rooms.start(KIND, alike, partial(add_parts, lent=lent, into=into))

        def come() -> Sequence[Tensor]:
            handle.wait()
            return into

        return come

    def _exchanged(self, bucket: _Bucket) -> Callable[[], Sequence[Tensor]]:
        """Begin to send everybody his parts."""
        transport, group = self._transport, bucket.group
        sends: dict[int, list[Tensor]] = {peer: [] for peer in group}
        for tensor, transfer in bucket.whole:
            for peer, index in zip(group, _parts(transfer), strict=True):
                if index is not None:
                    sends[peer].append(take(tensor, index))
        own = sends.pop(transport.rank)
        shapes = [transfer.shapes[0] for _, transfer in bucket.whole]
        wanted: list[Expected] = [(shape, bucket.whole[0][0].dtype) for shape in shapes if prod(shape)]
        assert isinstance(transport, Exchanges)
        arriving = transport.start_exchange(sends, dict.fromkeys(sends, wanted), group, KIND)
        assert arriving is not None
        into = self._memory(shapes, bucket.whole[0][0])
        return partial(_added, arriving, own, into, group, transport.rank)

    def _memory(self, shapes: Sequence[tuple[int, ...]], like: Tensor) -> list[Tensor]:
        """A tensor of each shape. They are gradients soon, and new memory costs more than the sums that go there; what
        is large goes back to the system, because it would be missed in the next forward."""
        lengths = [prod(shape) for shape in shapes]
        if sum(lengths) * like.itemsize > BUCKET:
            return [torch.empty(shape, dtype=like.dtype, device=like.device) for shape in shapes]
        found = self._spares.take(sum(lengths), like)
        return [part.view(shape) for part, shape in zip(found.split(lengths), shapes, strict=True)]


def can_start(transport: Transport) -> bool:
    """True if the job's transport exchanges in the background."""
    job, _ = of_job(transport, ())
    return isinstance(job, Exchanges)


@torch.no_grad()
def _added(
    arriving: Arriving, own: Sequence[Tensor], into: Sequence[Tensor], group: tuple[int, ...], rank: int
) -> Sequence[Tensor]:
    came = {**arriving.wait(), rank: own}
    queues = [iter(came[peer]) for peer in group]
    for total in into:
        if total.numel():
            combine([next(queue) for queue in queues], "sum", total)
    return into


def _parts(transfer: Transfer) -> tuple[Index | None, ...]:
    """What goes to each member, in group order."""
    found = {piece.peer: piece.index for piece in transfer.sends}
    return tuple(found.get(peer) for peer in transfer.group)

"""Device: the Transport for backends that do not block the host (NCCL and its like).

In: tensors on the rank's device. Out: the members' tensors, or their sum. Every call is issued by the calling thread,
in the order of the program, and `wait` is the backend's: on a device it makes the current stream wait, and the host
goes on. There is no thread, no shared memory and no exchange of words beside: two orders on two ranks would be a
deadlock of streams, and a program has one order. How each kind is carried:

    all_gather, reduce_scatter   the backend's own, one call for all tensors of a bucket; members whose parts are
                                 smaller than others' send padding
    all_reduce                   the backend's own, in place where the tensor is the caller's to write to; what it does
                                 not add (booleans, complex and short integers) is gathered and added here
    everything else              one uneven all_to_all of bytes

Messages of one rank for another (`post`, `take`) travel in the order of posting, on a communicator for this direction
alone, so that both ranks may send first. What comes when is told through the store: a rank receives what was posted
before, and keeps what was not asked for yet. Numbers that hosts tell each other (`tell`) go by the store too, of up
to 64 ranks: no device is waited for.

Sums are added in the backend's order: results equal the emulator's to rounding. It has run over gloo, and never on a
device.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp, ReduceScatterOptions

from weft.runtime.layout.index import narrowed, put, size, take
from weft.runtime.links.backend import Store
from weft.runtime.links.buffer_pool import is_private
from weft.runtime.links.groups import Groups
from weft.runtime.links.inbox import Inbox
from weft.runtime.links.processes import TIMEOUT, JobTransport, ProcessTransport
from weft.runtime.links.transport import (
    CollectiveMismatch,
    Done,
    Expected,
    Expects,
    Group,
    Handle,
    Sends,
    Sharded,
    Then,
    combine,
)
from weft.runtime.links.wire import as_bytes, num_bytes, pack, unpack

T = TypeVar("T")

OPS: dict[str, Any] = {"sum": ReduceOp.SUM, "prod": ReduceOp.PRODUCT, "max": ReduceOp.MAX, "min": ReduceOp.MIN}
ADDED = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)
)
"""Numbers that every backend adds."""
LANE = "device"
FEW = 64
"""Ranks that tell each other numbers by the store, which serves them one by one."""
POLL = 0.0005
"""Seconds between two looks for a message."""


class Issued(Generic[T]):
    """A call that was issued. What it reads and writes is held until it is waited for."""

    def __init__(self, work: Any, result: T, *held: Tensor) -> None:
        self._work, self._result, self._held = work, result, held

    def wait(self) -> T:
        if self._work is not None:
            self._work.wait()
            self._work, self._held = None, ()
        return self._result


class DeviceTransport(JobTransport):
    """One process's way to the others, from device to device.

    Args:
        store, groups, num_ranks, device, timeout: as of JobTransport.
    """

    by_block = True

    def __init__(
        self, store: Store, groups: Groups, num_ranks: int, *, device: torch.device, timeout: float = TIMEOUT
    ) -> None:
        super().__init__(store, groups, num_ranks, device=device, timeout=timeout)
        self._inbox = Inbox[Tensor]()
        self._posted, self._received = Counter[int](), Counter[int]()
        self._leaving: list[tuple[Any, Tensor]] = []
        self._met: set[tuple[int, int]] = set()
        self._told = Counter[Group]()

    def begin_step(self, step: int, *, check: bool | None = None) -> bool:
        self.step = step
        return bool(check)

    # -- collectives

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
        source = tensor.detach().contiguous()
        if not self._adds(source, group):
            return self._added_here(source, group, op)
        total = source.clone() if tensor.is_contiguous() else source
        self._reduced(total, group, op).wait()
        return total

    @torch.no_grad()
    def all_gather(
        self,
        tensor: Tensor,
        group: Group,
        *,
        shapes: Sequence[tuple[int, ...]] | None = None,
        kind: str = "all_gather",
        copies: bool = True,
    ) -> list[Tensor]:
        if shapes is not None and any(shape != tuple(tensor.shape) for shape in shapes):
            return super().all_gather(tensor, group, shapes=shapes, kind=kind, copies=copies)
        return [row.view(tensor.shape) for row in self._gathered(tensor.detach().reshape(-1), group).wait()]

    def all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> dict[int, list[Tensor]]:
        return self.start_all_to_all(sends, expects, group, kind).wait()

    @torch.no_grad()
    def start_all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> Handle[dict[int, list[Tensor]]]:
        own = [tensor.detach().clone() for tensor in sends.get(self.rank, ())] if self.rank in expects else None
        members = sorted(group)
        mine = [sends.get(peer, ()) if peer != self.rank else () for peer in members]
        wanted = [expects.get(peer, ()) if peer != self.rank else () for peer in members]
        flat, lengths = pack(mine, self.device, lambda name, length: self._bytes(length))
        sizes = [num_bytes(one) for one in wanted]
        came = self._bytes(sum(sizes))
        work = self._group(group).alltoall_base(came, flat, sizes, lengths) if len(group) > 1 else None

        def arrived(came: Tensor) -> dict[int, list[Tensor]]:
            found = dict(zip(members, unpack(came, wanted), strict=True))
            return {peer: own if peer == self.rank and own is not None else found[peer] for peer in expects}

        return Then(Issued(work, came, flat), arrived)

    @torch.no_grad()
    def start_all_reduce(self, parts: Sequence[Tensor], group: Group) -> Handle[Tensor]:
        others_see = len(parts) == 1 and parts[0].is_contiguous() and not is_private(parts[0])
        flats = [part.detach().contiguous().view(-1) for part in parts]
        flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        if not self._adds(flat, group):
            return Done(self._added_here(flat, group, "sum"))
        return self._reduced(flat.clone() if others_see else flat, group, "sum")

    @torch.no_grad()
    def start_all_gather(self, tensors: Sequence[Sharded], group: Group) -> Handle[None]:
        if len({one.full.dtype for one in tensors}) != 1:
            return super().start_all_gather(tensors, group)
        mine, most = group.index(self.rank), max(_lengths(tensors, group))
        shards = [one.shard.detach().reshape(-1) for one in tensors if one.parts[mine] is not None]
        filled = _with_padding(shards, most, tensors[0].full)
        flat = filled[0].contiguous() if len(filled) == 1 else torch.cat(filled)
        return Then(self._gathered(flat, group), lambda rows: _filled(tensors, rows))

    @torch.no_grad()
    def start_reduce_scatter(self, tensors: Sequence[Sharded], group: Group) -> Handle[None]:
        alike = len({one.full.dtype for one in tensors}) == 1
        if not (alike and self._adds(tensors[0].full, group)):
            return super().start_reduce_scatter(tensors, group)
        most, by_member = max(_lengths(tensors, group)), dict(zip(group, range(len(group)), strict=True))
        pieces = []
        for peer in sorted(group):
            at = by_member[peer]
            cut = [take(one.full, part).reshape(-1) for one in tensors if (part := one.parts[at]) is not None]
            pieces += _with_padding(cut, most, tensors[0].full)
        addends = torch.cat([one.detach() for one in pieces]) if len(pieces) > 1 else pieces[0].detach()
        total = addends.new_empty(most)
        options = ReduceScatterOptions()
        options.reduceOp = OPS["sum"]
        work = self._group(group)._reduce_scatter_base(total, addends, options)
        mine = by_member[self.rank]
        shards = [one.shard for one in tensors if one.parts[mine] is not None]
        return Then(Issued(work, total, addends), lambda total: _laid(shards, total))

    def tell(self, numbers: Sequence[float], group: Group) -> list[tuple[float, ...]]:
        if not 1 < len(group) <= FEW:
            return super().tell(numbers, group)
        number, name = self._told[group], "-".join(map(str, group))
        self._told[group] += 1
        self.store.set(f"told/{name}/{number}/{self.rank}", " ".join(map(repr, map(float, numbers))))
        keys = [f"told/{name}/{number}/{rank}" for rank in group]
        self._wait_for(keys, f"numbers of the ranks {list(group)}")
        found = [tuple(map(float, one.split())) for one in self.store.multi_get(keys)]
        if number:
            # who has said something this time has heard all of the time before
            self.store.delete_key(f"told/{name}/{number - 1}/{self.rank}")
        return found

    # -- how they are carried

    def _group(self, group: Group) -> Any:
        self._watch.check()
        if self.rank not in group:
            message = f"rank {self.rank} entered a collective of group {group}, which it is not in"
            raise CollectiveMismatch(message, rank=self.rank, waits={self.rank: f"is {self.doing}"})
        return self._groups.get(group, LANE)

    def _bytes(self, length: int) -> Tensor:
        return torch.empty(length, dtype=torch.uint8, device=self.device)

    def _adds(self, tensor: Tensor, group: Group) -> bool:
        """True if the backend is to add such numbers."""
        return tensor.dtype in ADDED and len(group) > 1 and tensor.numel() > 0

    def _reduced(self, total: Tensor, group: Group, op: str) -> Handle[Tensor]:
        options = AllreduceOptions()
        options.reduceOp = OPS[op]
        return Issued(self._group(group).allreduce([total.view(-1)], options), total)

    def _added_here(self, source: Tensor, group: Group, op: str) -> Tensor:
        rows = self._gathered(source.view(-1), group).wait()
        return combine([row.view(source.shape) for row in rows], op)

    def _gathered(self, flat: Tensor, group: Group) -> Handle[list[Tensor]]:
        """Everybody's flat tensor, all of one length, in group order; as bytes: backends know few dtypes."""
        if len(group) == 1 or not flat.numel():
            return Done([flat.clone() for _ in group])
        came, sent = flat.new_empty(len(group) * flat.numel()), as_bytes(flat)
        work = self._group(group)._allgather_base(came.view(torch.uint8), sent)
        at = {peer: row for row, peer in enumerate(sorted(group))}

        def rows(came: Tensor) -> list[Tensor]:
            found = came.view(len(group), -1).unbind()
            return [found[at[peer]] for peer in group]

        return Then(Issued(work, came, sent), rows)

    # -- messages

    def meet(self, pairs: Collection[tuple[int, int]]) -> None:
        for sender, taker in sorted(set(pairs) - self._met):
            if sender != taker and self.rank in (sender, taker):
                group, word = self._way(sender, taker), self._bytes(1)
                # the first use waits for the other rank: all meet in one order, now
                (group.send([word], 1, 0) if self.rank == sender else group.recv([word], 0, 0)).wait()
        self._met |= set(pairs)

    def _way(self, sender: int, taker: int) -> Any:
        return self._groups.pair(sender, taker, LANE)

    @torch.no_grad()
    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        if peer == self.rank:
            self._own_posts.leave(tag, tensors)
            return
        self._watch.check()
        assert (self.rank, peer) in self._met, f"rank {self.rank} posts {tag} for rank {peer}, and they have not met"
        parts = [as_bytes(tensor) for tensor in tensors]
        # always a copy: whoever posts may go on writing
        body = torch.cat(parts) if parts else self._bytes(0)
        number = self._posted[peer]
        self._posted[peer] += 1
        self.store.set(f"post/{self.rank}/{peer}/{number}", f"{body.numel()} {tag}")
        self._leaving = [(work, sent) for work, sent in self._leaving if not work.is_completed()]
        if body.numel():
            self._leaving.append((self._way(self.rank, peer).send([body], 1, 0), body))

    @torch.no_grad()
    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        if peer == self.rank:
            return self._own_posts.fetch(tag)
        while not self._inbox.has(peer, tag):
            self._receive(peer, tag)
        body = self._inbox.pop(peer, tag)
        assert body.numel() == num_bytes(expects), f"{tag} has {body.numel()} bytes, {num_bytes(expects)} were expected"
        return unpack(body, [expects])[0]

    def _receive(self, peer: int, wanted: str) -> None:
        """The next message of a rank, whatever its tag."""
        key = f"post/{peer}/{self.rank}/{self._received[peer]}"
        self._received[peer] += 1
        self._wait_for([key], f"{wanted} from rank {peer}")
        length, _, tag = self.store.get(key).decode().partition(" ")
        self.store.delete_key(key)
        body = self._bytes(int(length))
        if body.numel():
            self._way(peer, self.rank).recv([body], 0, 0).wait()
        self._inbox.put(peer, tag, body)

    def _wait_for(self, keys: list[str], what: str) -> None:
        """Until others have left a word in the store."""
        until = time.monotonic() + self._timeout
        while not self.store.check(keys):
            self._watch.check()
            if time.monotonic() > until:
                message = f"rank {self.rank} waited {self._timeout:g} s for {what}"
                raise CollectiveMismatch(message, rank=self.rank, waits=self._watch.waits())
            time.sleep(POLL)

    def close(self) -> None:
        for work, _ in self._leaving:
            work.wait(timedelta(seconds=1))
        self._leaving = []
        super().close()


def _lengths(tensors: Sequence[Sharded], group: Group) -> list[int]:
    """Elements of each member's parts, in the order of the group."""
    return [
        sum(math.prod(size(part)) for one in tensors if (part := one.parts[at]) is not None) for at in range(len(group))
    ]


def _with_padding(parts: Sequence[Tensor], length: int, like: Tensor) -> list[Tensor]:
    """Parts laid end to end to that length, the last of any content."""
    missing = length - sum(part.numel() for part in parts)
    return [*parts, *([like.new_empty(missing)] if missing or not parts else [])]


@torch.no_grad()
def _filled(tensors: Sequence[Sharded], rows: Sequence[Tensor]) -> None:
    """Each full tensor from the members' shards, in as few kernels as there can be."""
    views, sources = list[Tensor](), list[Tensor]()
    for at, row in enumerate(rows):
        start = 0
        for one in tensors:
            part = one.parts[at]
            if part is None:
                continue
            shape = size(part)
            piece = row[start : start + math.prod(shape)].view(shape)
            start += piece.numel()
            view = narrowed(one.full, part)
            if view is None:
                put(one.full, part, piece)
            else:
                views.append(view)
                sources.append(piece)
    if views:
        torch._foreach_copy_(views, sources)


@torch.no_grad()
def _laid(shards: Sequence[Tensor], total: Tensor) -> None:
    """A sum, in the shards that it is of."""
    pieces = total.split([*(one.numel() for one in shards), total.numel() - sum(one.numel() for one in shards)])
    if shards:
        torch._foreach_copy_(list(shards), [piece.view(one.shape) for piece, one in zip(pieces, shards, strict=False)])


def open_transport(
    store: Store, groups: Groups, num_ranks: int, *, device: torch.device, timeout: float, check: bool = True
) -> JobTransport:
    """The transport for the backend of the groups."""
    if groups.backend.host_waits:
        return ProcessTransport(store, groups, num_ranks, device=device, check=check, timeout=timeout)
    return DeviceTransport(store, groups, num_ranks, device=device, timeout=timeout)

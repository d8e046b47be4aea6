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

The watch knows of every call from its issue until the device is done with it, and keeps time: a message that nobody has
taken yet keeps nobody waiting, and has no limit.

Sums are added in the backend's order: results equal the emulator's to rounding. It has run over gloo, and never on a
device. Communicators are made when a program is opened, as far as its tables tell, and else at the first call.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp, ReduceScatterOptions

from weft.runtime.layout.index import take
from weft.runtime.layout.sharding import Sharding
from weft.runtime.links.backend import Store
from weft.runtime.links.bucketed import fill, fill_rows, rows_of, shards_of, wholes_of
from weft.runtime.links.buffer_pool import is_private
from weft.runtime.links.groups import Groups, name_of
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
    Then,
    combine,
)
from weft.runtime.links.wire import as_bytes, num_bytes, pack, unpack
from weft.runtime.program.lines import span
from weft.runtime.watch.calls import UnderWay
from weft.runtime.watch.states import MAIN
from weft.runtime.watch.watch import Watch

T = TypeVar("T")

OPS: dict[str, Any] = {"sum": ReduceOp.SUM, "prod": ReduceOp.PRODUCT, "max": ReduceOp.MAX, "min": ReduceOp.MIN}
ADDED = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)
)
"""Numbers that every backend adds."""
LANE = "device"
FEW = 64
"""Ranks that tell each other numbers by the store, which serves them one by one."""
TOLD = " told"
POLL = 0.0005
"""Seconds between two looks for a message."""


class Issued(Generic[T]):
    """A call that was issued. What it reads and writes is held until it is waited for.

    Args:
        call: is told when it is over.
        mark: as of the backend.
    """

    def __init__(
        self, work: Any, result: T, *held: Tensor, call: UnderWay, mark: Callable[[], Callable[[], bool]]
    ) -> None:
        self._work, self._result, self._held, self._call, self._mark = work, result, held, call, mark
        call.is_over = work.is_completed

    def wait(self) -> T:
        if self._work is not None:
            self._work.wait()
            # the work holds tensors
            self._call.is_over = self._mark()
            self._work, self._held = None, ()
        return self._result


class Asked(NamedTuple):
    """A call in words, put together when they are asked for."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} of {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class DeviceTransport(JobTransport):
    """One process's way to the others, from device to device.

    Args:
        store, groups, num_ranks, device, timeout, watch: as of JobTransport.
    """

    by_block = True

    def __init__(
        self,
        store: Store,
        groups: Groups,
        num_ranks: int,
        *,
        device: torch.device,
        timeout: float = TIMEOUT,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(store, groups, num_ranks, device=device, timeout=timeout, watch=watch)
        self._inbox = Inbox[Tensor]()
        self._posted, self._received = Counter[int](), Counter[int]()
        self._leaving: list[tuple[Any, Tensor]] = []
        self._met: set[tuple[int, int]] = set()
        self._adding = {op: _options(AllreduceOptions, kind) for op, kind in OPS.items()}
        self._scattering = _options(ReduceScatterOptions, ReduceOp.SUM)
        self._opened: dict[tuple[str, Group], tuple[Any, str, Group]] = {}
        self._told = Counter[Group]()

    def begin_step(self, step: int, *, check: bool | None = None) -> bool:
        self.step, self.watch.latest = step, self._calls
        return bool(check)

    def open(self, groups: Collection[Group]) -> None:
        # in one order on all ranks: to make a communicator waits for its members
        for members in sorted({tuple(sorted(group)) for group in groups if len(group) > 1}):
            self._group(members)

    # -- collectives

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
        if not self._adds(tensor, group):
            return self._added_here(tensor.contiguous(), group, op)
        total = tensor.clone(memory_format=torch.contiguous_format)
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
        arriving: Handle[Tensor] = Done(came)
        if len(group) > 1:
            arriving = self._issue(
                kind, group, flat, lambda ranks: ranks.alltoall_base(came, flat, sizes, lengths), came, flat
            )

        def arrived(came: Tensor) -> dict[int, list[Tensor]]:
            found = dict(zip(members, unpack(came, wanted), strict=True))
            return {peer: own if peer == self.rank and own is not None else found[peer] for peer in expects}

        return Then(arriving, arrived)

    @torch.no_grad()
    def start_all_reduce(self, parts: Sequence[Tensor], group: Group) -> Handle[Tensor]:
        others_see = len(parts) == 1 and parts[0].is_contiguous() and not is_private(parts[0])
        flats = [part.detach().contiguous().view(-1) for part in parts]
        flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        if not self._adds(flat, group):
            return Done(self._added_here(flat, group, "sum"))
        return self._reduced(flat.clone() if others_see else flat, group, "sum")

    @torch.no_grad()
    def start_all_gather(
        self, shards: Sequence[Tensor], sharding: Sharding, group: Group, full: Sequence[Tensor] | None = None
    ) -> Handle[list[Tensor]]:
        flat = self.empty(sum(sharding.aligned_lengths), sharding.dtype) if full is None else None
        made = list(full or ()) if flat is None else wholes_of(flat, sharding)
        sent = self._laid([shards[at] for at, _, _ in sharding.runs[group.index(self.rank)]], sharding)
        arriving = self._all_gathered(sent, group)
        if not sharding.in_rows or group != tuple(sorted(group)):
            return Then(arriving, lambda came: fill(made, sharding, rows_of(came, group)))
        if flat is None or not sharding.run:
            return Then(arriving, lambda came: fill_rows(made, sharding, came.view(len(group), -1)))
        order = sharding.order(self.device)

        def ordered(came: Tensor) -> list[Tensor]:
            with torch.no_grad():
                torch.index_select(came.view(-1, sharding.run), 0, order, out=flat.view(-1, sharding.run))
            return made

        return Then(arriving, ordered)

    @torch.no_grad()
    def start_reduce_scatter(self, full: Sequence[Tensor], sharding: Sharding, group: Group) -> Handle[list[Tensor]]:
        if not self._adds(full[0], group):
            return super().start_reduce_scatter(full, sharding, group)
        members = sorted(group)
        if sharding.in_rows and list(group) == members:
            addends = torch._chunk_cat(list(full), 0, len(group)).view(-1)
        else:
            runs = [sharding.runs[group.index(peer)] for peer in members]
            addends = torch.cat([self._laid([take(full[at], part) for at, part, _ in each], sharding) for each in runs])
        total = addends.new_empty(sharding.most)
        issued = self._issue(
            "reduce_scatter",
            group,
            addends,
            lambda ranks: ranks._reduce_scatter_base(total, addends, self._scattering),
            total,
            addends,
        )
        return Then(issued, lambda total: shards_of(total, sharding))

    def tell(self, numbers: Sequence[float], group: Group) -> list[tuple[float, ...]]:
        if not 1 < len(group) <= FEW:
            return super().tell(numbers, group)
        number, name = self._told[group], "-".join(map(str, group))
        self._told[group] += 1
        self.store.set(f"told/{name}/{number}/{self.rank}", " ".join(map(repr, map(float, numbers))))
        keys = [f"told/{name}/{number}/{rank}" for rank in group]
        self._calls.enter(MAIN, group, number, "numbers of all ranks", TOLD)
        self._wait_for(keys)
        self._calls.leave(MAIN)
        found = [tuple(map(float, one.split())) for one in self.store.multi_get(keys)]
        if number:
            # who has said something this time has heard all of the time before
            self.store.delete_key(f"told/{name}/{number - 1}/{self.rank}")
        return found

    # -- how they are carried

    def _issue(
        self, kind: str, group: Group, like: Tensor, begin: Callable[[Any], Any], result: T, *held: Tensor
    ) -> Issued[T]:
        """Begin a call on the communicator of a group.

        Args:
            like: a tensor that tells what is sent.
            held: until the call is waited for.
        """
        self.watch.check()
        ranks, key, members = self._group(group)
        call = self._calls.issued(key, members, Asked(kind, like.dtype, tuple(like.shape)))
        with span(kind, self.doing):
            return Issued(begin(ranks), result, *held, call=call, mark=self._mark)

    def _group(self, group: Group, lane: str = LANE) -> tuple[Any, str, Group]:
        """The communicator of a group, made if there is none, its name, and the members in its order."""
        found = self._opened.get((lane, group))
        if found is not None:
            return found
        if self.rank not in group:
            message = f"rank {self.rank} entered a collective of group {group}, which it is not in"
            raise CollectiveMismatch(message, rank=self.rank, waits={self.rank: f"is {self.doing}"})
        members = tuple(sorted(group))
        with self._calls.opening(MAIN, members):
            ranks = self._groups.get(members, lane)
        found = self._opened[lane, group] = ranks, f"{lane} {name_of(members)}", members
        return found

    def _mark(self) -> Callable[[], bool]:
        return self.backend.mark(self.device)

    def _bytes(self, length: int) -> Tensor:
        return torch.empty(length, dtype=torch.uint8, device=self.device)

    def _laid(self, tensors: Sequence[Tensor], sharding: Sharding) -> Tensor:
        """Tensors laid end to end, and behind them as much as any member has, of any content."""
        flats = [one if one.dim() == 1 else one.reshape(-1) for one in tensors]
        missing = sharding.most - sum(map(Tensor.numel, flats))
        if missing or not flats:
            flats.append(self.empty(missing, sharding.dtype))
        return torch.cat(flats) if len(flats) > 1 else flats[0].contiguous()

    def _adds(self, tensor: Tensor, group: Group) -> bool:
        """True if the backend is to add such numbers."""
        return tensor.dtype in ADDED and len(group) > 1 and tensor.numel() > 0

    def _reduced(self, total: Tensor, group: Group, op: str) -> Handle[Tensor]:
        adding = self._adding[op]
        return self._issue(f"all_reduce({op})", group, total, lambda ranks: ranks.allreduce([total], adding), total)

    def _added_here(self, source: Tensor, group: Group, op: str) -> Tensor:
        rows = self._gathered(source.view(-1), group).wait()
        return combine([row.view(source.shape) for row in rows], op)

    def _all_gathered(self, flat: Tensor, group: Group) -> Handle[Tensor]:
        """Everybody's flat tensor, all of one length, end to end by rank; as bytes where backends may not know the
        dtype."""
        if len(group) == 1 or not flat.numel():
            return Done(flat.clone() if len(group) == 1 else flat.new_empty(0))
        came = flat.new_empty(len(group) * flat.numel())
        sent, into = (flat, came) if flat.dtype in ADDED else (as_bytes(flat), came.view(torch.uint8))
        return self._issue("all_gather", group, flat, lambda ranks: ranks._allgather_base(into, sent), came, sent)

    def _gathered(self, flat: Tensor, group: Group) -> Handle[list[Tensor]]:
        """The same one by one, in group order."""
        return Then(self._all_gathered(flat, group), lambda came: rows_of(came, group))

    # -- messages

    def meet(self, pairs: Collection[tuple[int, int]]) -> None:
        for sender, taker in sorted(set(pairs) - self._met):
            if sender != taker and self.rank in (sender, taker):
                word = self._bytes(1)
                with self._calls.opening(MAIN, (sender, taker)):
                    group = self._way(sender, taker)
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
        self.watch.check()
        assert (self.rank, peer) in self._met, f"rank {self.rank} posts {tag} for rank {peer}, and they have not met"
        parts = [as_bytes(tensor) for tensor in tensors]
        # always a copy: whoever posts may go on writing
        body = torch.cat(parts) if parts else self._bytes(0)
        number = self._posted[peer]
        self._posted[peer] += 1
        self._calls.posted(MAIN, peer)
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
        self._calls.enter_message(MAIN, peer, self._received[peer], f"wait for {wanted}")
        self._received[peer] += 1
        self._wait_for([key])
        self._calls.leave(MAIN)
        length, _, tag = self.store.get(key).decode().partition(" ")
        self.store.delete_key(key)
        body = self._bytes(int(length))
        if body.numel():
            call = self._calls.issued(f"{LANE} {peer} to {self.rank}", (self.rank,), f"{tag} from rank {peer}")
            with span("message", tag, "from rank", peer):
                Issued(self._way(peer, self.rank).recv([body], 0, 0), body, call=call, mark=self._mark).wait()
        self._inbox.put(peer, tag, body)

    def _wait_for(self, keys: list[str]) -> None:
        """Until others have left a word in the store; the watch keeps time."""
        while not self.store.check(keys):
            self.watch.check()
            time.sleep(POLL)

    def close(self) -> None:
        for work, _ in self._leaving:
            work.wait(timedelta(seconds=1))
        self._leaving = []
        super().close()


def _options(kind: Any, op: Any) -> Any:
    made = kind()
    made.reduceOp = op
    return made


def open_transport(
    store: Store,
    groups: Groups,
    num_ranks: int,
    *,
    device: torch.device,
    timeout: float,
    check: bool = True,
    watch: Watch | None = None,
) -> JobTransport:
    """The transport for the backend of the groups."""
    if groups.backend.host_waits:
        return ProcessTransport(store, groups, num_ranks, device=device, check=check, timeout=timeout, watch=watch)
    return DeviceTransport(store, groups, num_ranks, device=device, timeout=timeout, watch=watch)

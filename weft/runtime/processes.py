"""Processes: the Transport whose ranks are processes of a torch.distributed job.

In: a store that all ranks reach, and this process's rank. Out: the emulator's interface over gloo or NCCL (backend.py),
and besides it `reduce_scatter`, and `start_sum`, which goes on in a second lane while the rank computes.
Promised: results equal the emulator's bit for bit where sums are added locally (gloo); no wait outlives its reason: a
rank that raises, leaves or is killed ends the waits of all others in seconds, and each error says who waited for whom.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from weft.runtime.backend import Backend, Store
from weft.runtime.channel import Channel
from weft.runtime.groups import Group, Groups
from weft.runtime.shared_sums import SharedSums, is_private
from weft.runtime.signature import Signature
from weft.runtime.transport import CollectiveMismatch, Doing, Expected, Stopped
from weft.runtime.watch import MAIN, Failure, PeerLost, Watch, mismatch_failure
from weft.runtime.wire import Want

TIMEOUT = 60.0
"""Seconds that one collective may take."""
ASIDE = "aside"
"""The lane of what was started and not yet waited for."""


T = TypeVar("T")


class Handle(Generic[T]):
    """A collective under way in the second lane."""

    def __init__(self, future: Future[T], watch: Watch) -> None:
        self._future, self._watch = future, watch

    def wait(self) -> T:
        """The result, when it is there."""
        self._watch.wait_for(ASIDE)
        found = self._future.result()
        self._watch.wait_for(None)
        return found


@dataclass(frozen=True)
class _Laid:
    """What is to be summed: whether it may be written to, and whether it lies in memory that all members see."""

    flat: Tensor
    private: bool
    shared: bool = False


class ProcessTransport:
    """One process's way to the others.

    Args:
        store: of this job alone.
        num_ranks: how many processes the job has; `groups` knows this one's rank.
        local_rank: number of the process on its host, which chooses its device.
        known: groups to make now, by all ranks in one order; others are made at first use.
        check: members make sure, before every call, that they mean the same. It costs a small exchange. All ranks must
            switch it at the same place of their programs; a program whose first step was checked needs no more of it.
        timeout: seconds that one collective may take.
        ends_process: end the process if it does not stop by itself when another rank failed.
    """

    def __init__(
        self,
        store: Store,
        groups: Groups,
        num_ranks: int,
        *,
        local_rank: int,
        known: Sequence[Group] = (),
        check: bool = True,
        timeout: float = TIMEOUT,
        ends_process: bool = True,
    ) -> None:
        self.rank, self.num_ranks = groups.rank, num_ranks
        self.device, self.doing = groups.backend.device(local_rank), Doing()
        self.store = store
        self.step: int | None = None
        self.always_check = False
        """Whoever would switch the check off is not to."""
        self._groups = groups
        self._watch = Watch(store, self.rank, num_ranks, self._busy, ends_process=ends_process)
        self._main, self._aside = (
            Channel(groups, self._watch, self.device, lane=lane, timeout=timeout, check=check) for lane in (MAIN, ASIDE)
        )
        self._worker: ThreadPoolExecutor | None = None
        self._opened: set[Group] = set()
        """Groups in which sums have been started."""
        for group in sorted(tuple(sorted(group)) for group in known if self.rank in group):
            self._main.open(group)

    @property
    def backend(self) -> Backend:
        return self._groups.backend

    @property
    def check(self) -> bool:
        """Whether members make sure that they mean the same; switch it at the same place on all ranks."""
        return self._main.check

    @check.setter
    def check(self, on: bool) -> None:
        self._main.check = self._aside.check = on

    def begin_step(self, step: int) -> None:
        """From now on messages name this step."""
        self.step = step

    # -- the Transport interface

    def all_reduce(self, tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
        return self._main.reduce(tensor, op, self._same(self._main, f"all_reduce({op})", tensor, group))

    def all_gather(self, tensor: Tensor, group: Group) -> list[Tensor]:
        return self._main.gather(tensor, self._same(self._main, "all_gather", tensor, group))

    def all_to_all(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        expects: Mapping[int, Sequence[Expected]],
        group: Group,
        kind: str = "all_to_all",
    ) -> dict[int, list[Tensor]]:
        outside = (sends.keys() | expects.keys()) - set(group)
        assert not outside, f"rank {self.rank} exchanges with ranks {sorted(outside)} outside the group {group}"
        wants = {peer: [self._known(one, peer) for one in expected] for peer, expected in expects.items()}
        signature = Signature(kind, group, self._main.number(group), sends=sends, expects=expects)
        return self._main.exchange(sends, wants, signature)

    def barrier(self, group: Group) -> None:
        self._main.barrier(Signature("barrier", group, self._main.number(group)))

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        self._main.post(peer, tag, tensors, self.num_ranks)

    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        wants = [self._known(one, peer) for one in expects]
        try:
            return self._main.take(peer, tag, wants, self.num_ranks)
        except PeerLost as error:
            raise PeerLost(f"{error}; rank {self.rank} waited for {tag} from rank {peer} ({self.doing})") from error

    # -- beyond it

    def reduce_scatter(self, parts: Sequence[Tensor], group: Group, op: str = "sum") -> Tensor:
        """The sum, in group order, of the part that every member has for this rank.

        Args:
            parts: one for each member, in the order of `group`. All members' parts for one rank are alike.
        """
        assert len(parts) == len(group), f"{len(parts)} parts for the {len(group)} ranks of {group}"
        own = [parts[group.index(self.rank)]] if self.rank in group else []
        signature = Signature(
            f"reduce_scatter({op})",
            group,
            self._main.number(group),
            sends={peer: [part] for peer, part in zip(group, parts, strict=True) if peer != self.rank},
            expects={peer: own for peer in group if peer != self.rank},
        )
        return self._main.reduce_scatter(parts, op, signature)

    def start_exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        expects: Mapping[int, Sequence[Expected]],
        group: Group,
        kind: str,
    ) -> Handle[dict[int, list[Tensor]]]:
        """Begin an `all_to_all` in the second lane: what is sent stays as it is until it has been waited for."""
        worker = self._opened_worker(group)
        wants = {peer: [self._known(one, peer) for one in expected] for peer, expected in expects.items()}
        return Handle(worker.submit(self._exchange_aside, sends, expects, wants, group, kind), self._watch)

    def _exchange_aside(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        expects: Mapping[int, Sequence[Expected]],
        wants: Mapping[int, Sequence[Want]],
        group: Group,
        kind: str,
    ) -> dict[int, list[Tensor]]:
        signature = Signature(kind, group, self._aside.number(group), sends=sends, expects=expects)
        return self._aside.exchange(sends, wants, signature)

    def start_sum(self, parts: Sequence[Tensor], group: Group) -> Handle[Tensor]:
        """Begin the sum of parts laid end to end, of one dtype; they are not looked at again if they are copied.

        All ranks begin sums in one order. They end in the order of their beginning, travel in groups of their own and
        so pass by other calls. A part that is alone in its memory may be written to.
        """
        worker = self._opened_worker(group)
        return Handle(worker.submit(self._sum_aside, self._laid(parts, group), group), self._watch)

    def room(self, numel: int, dtype: torch.dtype, group: Group, *, brief: bool = False) -> Tensor:
        """A flat tensor whose sum can be started as it lies. `brief`: it will not be there for long."""
        self._opened_worker(group)
        shared = self._aside.shared_sums(group)
        memory = None if shared is None else shared.lend(numel * dtype.itemsize, brief=brief)
        return torch.empty(numel, dtype=dtype, device=self.device) if memory is None else memory.view(dtype)

    def lends(self, group: Group) -> bool:
        """True if these ranks see each other's memory (`room`). All of them ask."""
        self._opened_worker(group)
        return self._aside.shared_sums(group) is not None

    def note(self, tensor: Tensor, group: Group) -> bytes | None:
        """Where the others find a tensor that lies in a room."""
        shared = self._aside.shared_sums(group)
        return None if shared is None else shared.note(tensor)

    def start_shared(
        self, kind: str, alike: Tensor, group: Group, work: Callable[[SharedSums, Sequence[int]], None]
    ) -> Handle[None]:
        """Begin what all members do with what lies in their rooms; it is held until that has ended."""
        worker = self._opened_worker(group)
        return Handle(worker.submit(self._shared_aside, kind, alike, group, [work]), self._watch)

    def _shared_aside(
        self, kind: str, alike: Tensor, group: Group, works: list[Callable[[SharedSums, Sequence[int]], None]]
    ) -> None:
        # taken out: whoever waits for the end may lend again what it holds, and the executor lets go of it later still
        self._aside.run_shared(works.pop(), self._same(self._aside, kind, alike, group))

    def _opened_worker(self, group: Group) -> ThreadPoolExecutor:
        """The second lane, with the ways between the members of a group opened."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"rank {self.rank} {ASIDE}")
        if self.rank in group and group not in self._opened:
            # while nothing else goes on here: groups are made in the order of the program
            self._worker.submit(self._aside.open, group).result()
            self._opened.add(group)
        return self._worker

    @torch.no_grad()
    def _laid(self, parts: Sequence[Tensor], group: Group) -> _Laid:
        """The parts end to end, in memory that all members see if there is some."""
        shared = self._aside.shared_sums(group) if self.rank in group else None
        if shared is not None and len(parts) == 1 and shared.owns(parts[0]):
            return _Laid(parts[0], private=True, shared=True)
        memory = None if shared is None else shared.lend(sum(part.nbytes for part in parts))
        if memory is None and len(parts) == 1:
            private = is_private(parts[0])
            return _Laid(parts[0].detach().contiguous().view(-1), private)
        flat = parts[0].new_empty(0) if memory is None else memory.view(parts[0].dtype)
        torch.cat([part.detach().reshape(-1) for part in parts], out=flat)
        return _Laid(flat, private=True, shared=memory is not None)

    def _sum_aside(self, laid: _Laid, group: Group) -> Tensor:
        signature = self._same(self._aside, "all_reduce(sum)", laid.flat, group)
        if laid.shared:
            return self._aside.reduce_shared(laid.flat, "sum", signature)
        return self._aside.reduce(laid.flat, "sum", signature, in_place=laid.private)

    def memory(self) -> list[Tensor]:
        """What is held for what travels; gradients that are summed where they lie are among it."""
        return [*self._main.memory(), *self._aside.memory()]

    # -- its end

    def fail(self, error: BaseException) -> Failure:
        """Tell all ranks that this one failed, and how."""
        failure = self._failure(error)
        self._watch.tell()
        if failure.sort != "stopped":
            self._watch.fail(failure)
        return failure

    def close(self) -> None:
        """This rank is done: it will enter no further call."""
        if self._worker is not None:
            self._worker.shutdown()
        self._main.close()
        self._aside.close()
        self._watch.close()

    def _failure(self, error: BaseException) -> Failure:
        if isinstance(error, CollectiveMismatch):
            return mismatch_failure(error, self.doing, self.step)
        sort = {Stopped: "stopped", PeerLost: "lost"}.get(type(error), "error")
        text = "".join(traceback.format_exception(error))
        what, place = self.doing.what, self.doing.place
        return Failure(self.rank, sort, type(error).__name__, str(error), what, place, self.step, text)

    def _busy(self) -> tuple[Doing, int | None]:
        return self.doing, self.step

    def _same(self, channel: Channel, kind: str, tensor: Tensor, group: Group) -> Signature:
        """The signature of a call in which all members' tensors are alike."""
        return Signature(kind, group, channel.number(group), alike=tensor)

    def _known(self, expected: Expected, peer: int) -> Want:
        shape, dtype = expected
        assert dtype is not None, f"the dtype of what rank {peer} sends is not known on rank {self.rank}"
        # a mode may have its own way with dtypes
        plain = not torch._C._len_torch_dispatch_stack()
        return tuple(shape), dtype if plain else torch.empty(0, dtype=dtype).dtype

"""Processes: the Transport whose ranks are processes of a torch.distributed job.

In: a store that all ranks reach, and this process's rank. Out: the emulator's interface over gloo.
What is started goes on in a second lane, a thread of its own, while the rank computes. Where the members of a group are
processes of one host they read each other's memory (`shm/`); `buffer` is memory that they see.
Promised: results equal the emulator's bit for bit where sums are added locally (gloo); no wait outlives its reason: a
rank that raises, leaves or is killed ends the waits of all others in seconds, and each error says who waited for whom.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from weft.runtime.layout.sharding import Sharding
from weft.runtime.links.backend import Backend, Store
from weft.runtime.links.buffer_pool import BufferPool, is_private
from weft.runtime.links.channel import Channel
from weft.runtime.links.groups import Groups
from weft.runtime.links.inbox import OwnPosts
from weft.runtime.links.transport import (
    CollectiveMismatch,
    Doing,
    Expected,
    Expects,
    Group,
    Handle,
    PeerFailed,
    PeerLost,
    Sends,
    Then,
    Transport,
)
from weft.runtime.links.wire import LARGE
from weft.runtime.program.lines import span
from weft.runtime.watch.calls import Calls
from weft.runtime.watch.progress import Began
from weft.runtime.watch.states import MAIN, Busy, Failure, failure_of
from weft.runtime.watch.watch import Watch

if TYPE_CHECKING:
    from weft.runtime.shm.collectives import Work
    from weft.runtime.shm.pool import SharedPool

TIMEOUT = 60.0
"""Seconds that one collective may take."""
SPARE = 4 << 20
"""Bytes of a result up to which its memory is used again: new memory costs more than what is written there, unless it
is small."""
SPARES = 8 << 20
"""Bytes of all memory that waits to be used again."""
TOLD = "_weft_told"
"""The attribute of errors that the other ranks know of."""
BACKGROUND = "background"
"""The lane of what was started and not yet waited for."""


T = TypeVar("T")


class Started(Generic[T]):
    """A call in the second lane."""

    def __init__(self, future: Future[T], calls: Calls) -> None:
        self._future, self._calls = future, calls

    def wait(self) -> T:
        """The result, when it is there."""
        self._calls.wait_for(BACKGROUND)
        with span("wait for a collective"):
            found = self._future.result()
        self._calls.wait_for(None)
        return found


class JobTransport(Transport):
    """One process's place in a job, whatever carries its messages: who failed, who waits, what step it is.

    Args:
        store: of this job alone.
        num_ranks: how many processes the job has; `groups` knows this one's rank.
        device: where the rank's tensors live.
        timeout: seconds that one collective may take.
        watch: that the process has already, for another transport.
    """

    def __init__(
        self,
        store: Store,
        groups: Groups,
        num_ranks: int,
        *,
        device: torch.device,
        timeout: float,
        watch: Watch | None = None,
    ) -> None:
        self.rank, self.num_ranks = groups.rank, num_ranks
        self.device, self.doing = device, Doing()
        self.store, self._own_posts = store, OwnPosts()
        self.step: int | None = None
        self.whose = ""
        """The module that it is for, where a rank has several."""
        self._groups = groups
        self.watch = Watch(store, self.rank, num_ranks) if watch is None else watch
        self._calls = self.watch.open(self._busy, timeout)
        self._num_raised = 0

    @property
    def backend(self) -> Backend:
        return self._groups.backend

    def memory(self) -> list[Tensor]:
        """What is held for what travels."""
        return []

    def progress(self, reference: int) -> Began:
        return self.watch.progress.of_module(reference)

    def passed(self, update: int) -> None:
        self._calls.update = update

    def compared(self, update: int, mine: float, group: Group) -> dict[int, float | None]:
        return self._calls.compared(update, mine, group)

    # -- its end

    def raised(self, error: Exception) -> None:
        if isinstance(error, PeerFailed) or vars(error).get(TOLD):
            return
        vars(error)[TOLD] = True
        self._num_raised += 1
        fits = not isinstance(error, CollectiveMismatch | PeerLost)
        words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        # whoever keeps what ranks tell each other may be gone, for the same reason: the error is what matters
        with suppress(torch.distributed.DistError):
            if not (fits and self._calls.raised(self._num_raised, words)):
                self.fail(error)

    def fail(self, error: BaseException) -> Failure:
        """Tell all ranks that this one failed, and how."""
        failure = failure_of(self.rank, error, self.watch.busy)
        self.watch.tell()
        if failure.sort != "stopped":
            self.watch.fail(failure)
        return failure

    def close(self) -> None:
        """This rank is done: it will enter no further call."""
        self.watch.close(self._calls)

    def _busy(self) -> Busy:
        return Busy(self.doing, self.step, self.whose if self.watch.is_shared else "")


class ProcessTransport(JobTransport):
    """One process's way to the others, through the host's memory.

    Args:
        check: members make sure, before every call, that they mean the same. It costs a small exchange. All ranks must
            switch it at the same place of their programs; a program whose first step was checked needs no more of it.
    """

    def __init__(
        self,
        store: Store,
        groups: Groups,
        num_ranks: int,
        *,
        device: torch.device,
        check: bool = True,
        timeout: float = TIMEOUT,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(store, groups, num_ranks, device=device, timeout=timeout, watch=watch)
        self._always_check = os.environ.get("WEFT_CHECK") == "1"
        """Whoever would switch the check off is not to."""
        self._main, self._background = (
            Channel(groups, self._calls, self.device, lane=lane, check=check) for lane in (MAIN, BACKGROUND)
        )
        self._spare = {True: BufferPool(SPARES), False: BufferPool(0)}
        self._worker: ThreadPoolExecutor | None = None
        self._opened: set[Group] = set()
        """Groups in which sums have been started."""

    @property
    def check(self) -> bool:
        """Whether members make sure that they mean the same; switch it at the same place on all ranks."""
        return self._main.check

    @check.setter
    def check(self, on: bool) -> None:
        self._main.check = self._background.check = on

    def begin_step(self, step: int, *, check: bool | None = None) -> bool:
        self.step, self.watch.latest = step, self._calls
        if check is not None:
            self.check = self._always_check or check
        return self.check

    # -- the Transport interface

    def all_reduce(self, tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
        with span("all_reduce", self.doing):
            return self._main.reduce(tensor, op, group)

    def all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> dict[int, list[Tensor]]:
        with span(kind, self.doing):
            return self._main.exchange(sends, expects, group, kind)

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        if peer == self.rank:
            self._own_posts.leave(tag, tensors)
        else:
            self._main.post(peer, tag, tensors)

    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        if peer == self.rank:
            return self._own_posts.fetch(tag)
        try:
            return self._main.take(peer, tag, expects)
        except PeerLost as error:
            raise PeerLost(
                f"{error.message}; rank {self.rank} waited for {tag} from rank {peer} ({self.doing})"
            ) from error

    def open_mail(self) -> None:
        self._main.mailbox()

    # -- in the second lane

    def start_all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> Handle[dict[int, list[Tensor]]]:
        return self._start(group, lambda: self._background.exchange(sends, expects, group, kind))

    def start_all_reduce(self, parts: Sequence[Tensor], group: Group) -> Handle[Tensor]:
        pool = self._pool(group, sum(part.nbytes for part in parts))
        if pool is not None:
            return self._sum_shared(pool, parts, group)
        private = len(parts) > 1 or is_private(parts[0])
        flat = torch.cat([part.detach().reshape(-1) for part in parts]) if len(parts) > 1 else _flat(parts[0])
        return self._start(group, lambda: self._background.reduce(flat, "sum", group, in_place=private))

    def start_all_gather(
        self, shards: Sequence[Tensor], sharding: Sharding, group: Group, full: Sequence[Tensor] | None = None
    ) -> Handle[list[Tensor]]:
        made = self.wholes(sharding) if full is None else list(full)
        handle = self._start_sharded("all_gather", made, shards, sharding, group)
        return handle or super().start_all_gather(shards, sharding, group, made)

    def start_reduce_scatter(self, full: Sequence[Tensor], sharding: Sharding, group: Group) -> Handle[list[Tensor]]:
        handle = self._start_sharded("reduce_scatter", full, None, sharding, group)
        return handle or super().start_reduce_scatter(full, sharding, group)

    def buffer(self, numel: int, dtype: torch.dtype, group: Group, *, brief: bool = False) -> Tensor:
        num_bytes = numel * dtype.itemsize
        pool = self._pool(group, num_bytes)
        return super().buffer(numel, dtype, group) if pool is None else pool.lend(num_bytes, brief=brief).view(dtype)

    def empty(self, numel: int, dtype: torch.dtype, *, brief: bool = False) -> Tensor:
        if not LARGE <= numel * dtype.itemsize <= SPARE or self.device.type != "cpu":
            return super().empty(numel, dtype)
        return self._spare[brief].take(numel, dtype)

    def lay(self, tensors: Sequence[Tensor], group: Group) -> None:
        pool = self._pool(group, sum(one.nbytes for one in tensors))
        if pool is not None:
            from weft.runtime.shm.collectives import shared  # noqa: PLC0415 - loaded where it is used only

            for tensor, laid in zip(tensors, shared(pool, [one.data for one in tensors], brief=False)[0], strict=True):
                tensor.data = laid

    def _start_sharded(
        self, kind: str, full: Sequence[Tensor], shards: Sequence[Tensor] | None, sharding: Sharding, group: Group
    ) -> Handle[list[Tensor]] | None:
        """Members read what lies in their pools; None: it is sent. `shards`: None where they are what is made."""
        alike = torch.empty(sharding.nbytes, dtype=torch.uint8, device="meta")
        pool = self._pool(group, alike.nbytes)
        if pool is None:
            return None
        from weft.runtime.shm.collectives import SHARDED  # noqa: PLC0415 - loaded where it is used only

        made = self.shards(sharding) if shards is None else list(full)
        work = SHARDED[kind](pool, full, made if shards is None else shards, sharding)
        started = self._start_shared(kind, alike, group, work)
        return Then(started, lambda _: made)

    @torch.no_grad()
    def _sum_shared(self, pool: SharedPool, parts: Sequence[Tensor], group: Group) -> Handle[Tensor]:
        from weft.runtime.shm.collectives import all_reduce  # noqa: PLC0415 - loaded where it is used only

        flat, address = parts[0], pool.address(parts[0]) if len(parts) == 1 else None
        if address is None:
            memory = pool.lend(sum(part.nbytes for part in parts))
            flat = torch.cat([part.detach().reshape(-1) for part in parts], out=memory.view(parts[0].dtype))
            address = pool.address(flat)
            assert address is not None
        return Then(self._start_shared("all_reduce(sum)", flat, group, all_reduce(pool, flat, address)), lambda _: flat)

    def _start_shared(self, kind: str, alike: Tensor, group: Group, work: Work) -> Handle[None]:
        """Begin what all members do with what lies in their pools; `alike`: of one shape and dtype on all."""
        # taken out: whoever waits for the end may use again what it holds, and the executor lets go of it later still
        held = [(work, alike)]

        def run() -> None:
            now, like = held.pop()
            self._background.run_shared(now, kind, like, group)

        return self._start(group, run)

    def _start(self, group: Group, work: Callable[[], T]) -> Handle[T]:
        return Started(self._opened_worker(group).submit(work), self._calls)

    def _opened_worker(self, group: Group) -> ThreadPoolExecutor:
        """The second lane, with the ways between the members of a group opened."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"rank {self.rank} {BACKGROUND}")
        if self.rank in group and group not in self._opened:
            # while nothing else goes on here: groups are made in the order of the program
            self._worker.submit(self._background.open, group).result()
            self._opened.add(group)
        return self._worker

    def _pool(self, group: Group, num_bytes: int) -> SharedPool | None:
        """Memory that the members see; None if they cannot, or this is too little to be shared."""
        self._opened_worker(group)
        return self._background.pool(group) if self.rank in group and num_bytes >= LARGE else None

    def memory(self) -> list[Tensor]:
        """What is held for what travels; gradients that are summed where they lie are among it."""
        return [*self._main.memory(), *self._background.memory()]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        self._main.close()
        self._background.close()
        super().close()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1)

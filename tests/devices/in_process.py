"""The transport of devices between threads of one process: results come late, and what is issued is written down.

In: a body for each rank, as `run_ranks` of the emulator takes it. Out: its results; and for each rank its `Event`s, for
`stream_order.py` to judge. The transport is the one for devices; below it, in place of NCCL, is a backend whose groups
live in this process. They really exchange, and are as unhelpful as streams allow:

- nothing is done when a call is issued, but that the host's values are gone from what it writes to: bytes of ones
  (NaN) lie there until it is waited for;
- what it reads and writes may not change before it is waited for: both are compared then.

Waiting blocks the thread until all members have issued the call. Where each rank issues and waits from one thread, that
is the order that streams keep too. Sums are added in the order of ranks, so members agree to the bit.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.devices.stream_order import Event, History
from weft.runtime.links import emulator
from weft.runtime.links.backend import Backend, PrefixStore
from weft.runtime.links.device import OPS, DeviceTransport
from weft.runtime.links.groups import Groups
from weft.runtime.links.transport import Transport, combine

# where it is: type checkers cannot see it
from torch._C._distributed_c10d import HashStore  # isort: skip

T = TypeVar("T")

TIMEOUT = 30.0
"""Seconds that a call may wait for its last member."""
PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"))
"""Operators that count as work of the device."""


class Recorder:
    """What the ranks of one run have issued and waited for, in the order in which each did so."""

    def __init__(self) -> None:
        self.events: dict[int, list[Event]] = {}
        self.products: Counter[int] = Counter()
        """Operators of `PRODUCTS` that each rank has run so far; 0 if it does not count them."""
        self.steps: dict[int, list[int]] = {}
        """For each rank, how many events there were when each step began."""

    def add(self, rank: int, what: str, call: tuple[str, int], kind: str) -> None:
        self.events.setdefault(rank, []).append(Event(what, call, kind, self.products[rank]))

    def begin_step(self, rank: int) -> None:
        self.steps.setdefault(rank, []).append(len(self.events.get(rank, ())))

    @property
    def histories(self) -> History:
        return [self.events.get(rank, []) for rank in range(max(self.events, default=-1) + 1)]

    def by_step(self) -> list[History]:
        """The events of each step; what went before the first and after the beginning of the last is left out."""
        spans = [list(pairwise(self.steps[rank])) for rank in sorted(self.steps)]
        return [
            [events[begin:end] for events, (begin, end) in zip(self.histories, each, strict=True)]
            for each in zip(*spans, strict=True)
        ]

    @contextmanager
    def counting(self, rank: int) -> Iterator[None]:
        """Count the work of a rank in this thread."""
        with _Counting(self.products, rank):
            yield


class _Counting(TorchDispatchMode):
    def __init__(self, products: Counter[int], rank: int) -> None:
        super().__init__()
        self._products, self._rank = products, rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._products[self._rank] += func.overloadpacket.__name__ in PRODUCTS
        return func(*args, **(kwargs or {}))


@dataclass
class _Communicator:
    """What the members of one communicator share; guarded by the process's `changed`."""

    name: str
    size: int
    calls: dict[int, dict[int, _Entry]] = field(default_factory=dict)
    """By number and member, those that somebody has still to issue."""


@dataclass
class _Entry:
    """What one member brings to a call."""

    kind: str
    sent: Tensor
    sizes: list[int]


class Process:
    """What the ranks of one run share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.recorder = Recorder()
        self._communicators: dict[str, _Communicator] = {}
        self._numbers = count()

    def communicator(self, store: Any, size: int) -> _Communicator:
        """That of those who meet in a store."""
        with self.changed:
            if not store.check(["communicator"]):
                store.set("communicator", f"communicator {next(self._numbers)}")
            name = store.get("communicator").decode()
            return self._communicators.setdefault(name, _Communicator(name, size))


@dataclass(frozen=True)
class InProcess(Backend):
    """One rank's way to the groups of the process.

    Args:
        look: raises if there is nothing to wait for.
    """

    process: Process
    rank: int
    look: Callable[[], None]

    def make_group(self, store: Any, position: int, size: int, links: Any, **settings: Any) -> Any:
        return _Member(self, self.process.communicator(store, size), position)


class _Member:
    """A communicator as one rank sees it: what the transport calls of a backend's group."""

    def __init__(self, backend: InProcess, among: _Communicator, position: int) -> None:
        self._backend, self._among, self._position, self._number = backend, among, position, 0

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Work:
        op = next(name for name, known in OPS.items() if options.reduceOp == known)
        (total,) = tensors
        return self._issue(f"all_reduce({op})", total, total, lambda each: combine(each, op))

    def _allgather_base(self, came: Tensor, sent: Tensor) -> _Work:
        return self._issue("all_gather", came, sent, torch.cat)

    def _reduce_scatter_base(self, total: Tensor, addends: Tensor, options: Any) -> _Work:
        assert options.reduceOp == OPS["sum"], "gradients are summed"
        mine = slice(self._position * total.numel(), (self._position + 1) * total.numel())
        return self._issue("reduce_scatter", total, addends, lambda each: combine([one[mine] for one in each], "sum"))

    def alltoall_base(self, came: Tensor, sent: Tensor, wanted: list[int], sizes: list[int]) -> _Work:
        assert sum(wanted) == came.numel() and sum(sizes) == sent.numel()
        return self._issue("all_to_all", came, sent, torch.cat, sizes)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Work:
        (sent,) = tensors
        return self._issue("message", sent[:0], sent, torch.cat, [sent.numel() * (at == to) for at in range(2)])

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> _Work:
        (came,) = tensors
        return self._issue("message", came, came[:0], torch.cat, [0, 0])

    def _issue(
        self,
        kind: str,
        written: Tensor,
        read: Tensor,
        make: Callable[[list[Tensor]], Tensor],
        sizes: Sequence[int] = (),
    ) -> _Work:
        """Enter the next call of the communicator.

        Args:
            make: what is written, of what the members sent; of what each sent this one, if it says `sizes`.
        """
        number, self._number = self._number, self._number + 1
        entry = _Entry(kind, read.detach().clone(), list(sizes))
        process, among = self._backend.process, self._among
        with process.changed:
            process.recorder.add(self._backend.rank, "issue", (among.name, number), kind)
            entries = among.calls.setdefault(number, {})
            entries[self._position] = entry
            if len(entries) == among.size:
                del among.calls[number]
            process.changed.notify_all()
        return _Work(self._backend, among, number, self._position, entries, written, read, make)


@dataclass(eq=False)
class _Work:
    """A call that was issued."""

    backend: InProcess
    among: _Communicator
    number: int
    position: int
    entries: dict[int, _Entry]
    written: Tensor
    read: Tensor
    make: Callable[[list[Tensor]], Tensor]

    def __post_init__(self) -> None:
        self._in_place = self.written is self.read
        _bytes(self.written).fill_(255)

    def is_completed(self) -> bool:
        return len(self.entries) == self.among.size

    def wait(self, limit: timedelta = timedelta(seconds=TIMEOUT)) -> bool:
        # a stream would wait from here on, and the host go on
        self.backend.process.recorder.add(self.backend.rank, "wait", (self.among.name, self.number), self._mine.kind)
        self._wait_for_members(time.monotonic() + limit.total_seconds())
        kinds = {one.kind for one in self.entries.values()}
        assert len(kinds) == 1, f"call {self.number} of {self.among.name}: members entered {sorted(kinds)}"
        if not self._in_place:
            same = torch.equal(_bytes(self.read), _bytes(self._mine.sent))
            assert same, f"what an {self._mine.kind} reads was written to before it was waited for"
        late = bool((_bytes(self.written) == 255).all())
        assert late, f"what an {self._mine.kind} writes to was written to before it was waited for"
        self.written.copy_(self.make([self._from(at) for at in range(self.among.size)]))
        return True

    @property
    def _mine(self) -> _Entry:
        return self.entries[self.position]

    def _from(self, member: int) -> Tensor:
        """What a member sent this one."""
        entry = self.entries[member]
        return entry.sent.split(entry.sizes)[self.position] if entry.sizes else entry.sent

    def _wait_for_members(self, until: float) -> None:
        changed = self.backend.process.changed
        with changed:
            while not changed.wait_for(self.is_completed, 0.05):
                self.backend.look()
                missing = sorted(set(range(self.among.size)) - self.entries.keys())
                words = f"{self._mine.kind}, call {self.number} of {self.among.name}, lacks members {missing}"
                assert time.monotonic() < until, words


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def run_ranks(
    num_ranks: int,
    body: Callable[[Transport], T],
    *,
    recorder: Recorder | None = None,
    kind: type[DeviceTransport] = DeviceTransport,
) -> list[T]:
    """Run `body` on every rank, each in a thread, as the emulator does, over the transport of devices."""
    process, store = Process(), HashStore()
    process.recorder = recorder or process.recorder

    def ranked(emulated: Transport) -> T:
        def look() -> None:
            # raises if another rank has failed
            emulated.doing = transport.doing

        backend = InProcess("in process", "cpu", False, process, emulated.rank, look)
        groups = Groups(PrefixStore("groups", store), emulated.rank, backend, local=True)
        device = torch.device("cpu")
        transport = kind(PrefixStore("job", store), groups, num_ranks, device=device, timeout=TIMEOUT)
        try:
            return body(transport)
        finally:
            transport.close()

    return emulator.run_ranks(num_ranks, ranked)

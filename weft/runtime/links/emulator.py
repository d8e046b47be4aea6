"""The emulator: ranks as threads of one process, with an in-memory transport.

Enters: a number of ranks and a body that each runs with its own Transport. Leaves: the bodies' results, in rank order.
Promised: the same numbers in every run (sums are added in the order of the group by one thread); no hang: when a rank
raises, or every live rank waits for something that cannot come, all are woken, joined, and one error names the ranks
and what each was doing. No tensor is shared between ranks: what is sent is copied when the call is entered, and what
is received belongs to the receiver.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.runtime.links.inbox import Inbox
from weft.runtime.links.signature import Signature, difference, text_of
from weft.runtime.links.transport import (
    CollectiveMismatch,
    Doing,
    Expected,
    Expects,
    Group,
    RankFailed,
    Sends,
    Stopped,
    Transport,
    combine,
    copied,
)
from weft.runtime.program.context import Ambient
from weft.runtime.program.lines import span

T = TypeVar("T")

GRACE = 10.0
"""Seconds that a stopped rank gets to come to its next collective before it is left behind (its thread is a daemon)."""

IMPATIENCE = 0.5
"""The same when the caller is interrupted (Ctrl-C)."""

LOOK_UP = 0.1
"""Seconds after which the caller of the ranks looks up from waiting."""


def run_ranks(num_ranks: int, body: Callable[[Transport], T], *, timeout: float = 60.0) -> list[T]:
    """Run `body` on every rank, each in a thread, and return the results in rank order.

    Args:
        timeout: seconds that one collective may wait for its last member.

    KeyboardInterrupt ends the ranks at their next operator and leaves at once.

    Raises:
        RankFailed: a rank raised (the lowest one, if several did).
        CollectiveMismatch: ranks entered different collectives, or wait for ones that nobody will enter.

    >>> run_ranks(2, lambda transport: transport.all_reduce(torch.tensor(transport.rank + 1), (0, 1)).item())
    [3, 3]
    """
    _load_late_modules()
    board = _Board(num_ranks, timeout)
    transports = [_Emulated(board, rank) for rank in range(num_ranks)]
    results: list[Any] = [None] * num_ranks
    ambient = Ambient.here()

    def work(rank: int) -> None:
        try:
            with ambient.entered():
                results[rank] = body(transports[rank])
        except BaseException as error:  # noqa: BLE001 - whatever it is, `run_ranks` raises it
            board.end(rank, error)
        else:
            board.end(rank, None)

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(num_ranks)
    ]
    grace = IMPATIENCE
    try:
        for thread in threads:
            thread.start()
        board.wait_for_end(GRACE)
        grace = GRACE
    finally:
        # if the caller is interrupted the ranks must not outlive the call, nor must the user wait for them
        board.stop()
        board.wait_for_end(grace)
        for rank in tuple(board.ended):
            threads[rank].join()
    board.raise_failure(transports)
    return results


def _load_late_modules() -> None:
    """torch imports some of its modules in the first backward; from many threads at once they may be met half made."""
    with torch.enable_grad():
        root = torch.zeros((), requires_grad=True) * 1
        torch.autograd.backward([root], [torch.ones(())])


@dataclass
class _Meeting:
    """One collective call of a group: who is there, meaning what, and the result once everybody is."""

    entries: dict[int, Signature] = field(default_factory=dict)
    doing: dict[int, Doing] = field(default_factory=dict)
    result: Any = None
    done: bool = False

    def describe(self, rank: int) -> str:
        words = self.entries[rank].words
        missing = [str(other) for other in words.group if other not in self.entries]
        absent = f", waiting for rank {' and '.join(missing)}" if missing else ""
        return f"is in {words}, {words.where}{absent} ({self.doing[rank]})"


@dataclass(frozen=True)
class _Message:
    """A message that a rank waits for."""

    peer: int
    tag: str
    doing: Doing

    def describe(self, rank: int) -> str:
        return f"waits for {self.tag} from rank {self.peer} ({self.doing})"


class _Board:
    """What the rank threads share. Every attribute is guarded by `changed`."""

    def __init__(self, num_ranks: int, timeout: float) -> None:
        self.num_ranks, self.timeout = num_ranks, timeout
        self.changed = threading.Condition()
        self.meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self.waiting: dict[int, _Meeting | _Message] = {}
        self.inboxes = [Inbox[list[Tensor]]() for _ in range(num_ranks)]
        self.ended: set[int] = set()
        self.stopped = False
        self.mismatch: CollectiveMismatch | None = None
        self.errors: dict[int, BaseException] = {}

    def meet(
        self, rank: int, mine: Signature, doing: Doing, finish: Callable[[_Meeting], Any] = lambda meeting: None
    ) -> _Meeting:
        """Enter the group's next collective and come back when all members have; the last one runs `finish`."""
        meeting = self._enter(rank, mine, doing)
        if len(meeting.entries) == len(mine.group):
            result = finish(meeting)
            with self.changed:
                meeting.result, meeting.done = result, True
                for other in mine.group:
                    self.waiting.pop(other, None)
                self.changed.notify_all()
            return meeting
        with self.changed:
            in_time = self.changed.wait_for(lambda: meeting.done or self.stopped, self.timeout)
            if not in_time:
                self._refuse(f"rank {rank} waited {self.timeout:g} s for a collective", rank)
            if not meeting.done:
                raise Stopped
        return meeting

    def post(self, rank: int, peer: int, tag: str, tensors: list[Tensor]) -> None:
        """Leave a message; nobody waits."""
        with self.changed:
            if self.stopped:
                raise Stopped
            assert not self.inboxes[peer].has(rank, tag), f"rank {rank} sent {tag} to rank {peer} twice"
            self.inboxes[peer].put(rank, tag, tensors)
            waits = self.waiting.get(peer)
            if isinstance(waits, _Message) and (waits.peer, waits.tag) == (rank, tag):
                # it can go on: not stuck from here on
                del self.waiting[peer]
            self.changed.notify_all()

    def take(self, rank: int, message: _Message) -> list[Tensor]:
        """Wait for a message."""
        inbox, key = self.inboxes[rank], (message.peer, message.tag)
        with self.changed:
            if not inbox.has(*key):
                self.waiting[rank] = message
                self._refuse_deadlock(rank)
            in_time = self.changed.wait_for(lambda: inbox.has(*key) or self.stopped, self.timeout)
            if not in_time:
                self._refuse(f"rank {rank} waited {self.timeout:g} s for {message.tag} from rank {message.peer}", rank)
            if not inbox.has(*key):
                raise Stopped
            return inbox.pop(*key)

    def _enter(self, rank: int, mine: Signature, doing: Doing) -> _Meeting:
        group, number = mine.group, mine.number
        with self.changed:
            if self.stopped:
                raise Stopped
            meeting = self.meetings.setdefault((group, number), _Meeting())
            faults = (difference(rank, mine.words, other, one.words) for other, one in meeting.entries.items())
            fault = next(filter(None, faults), "")
            meeting.entries[rank], meeting.doing[rank] = mine, doing
            if fault or rank not in group:
                self.waiting[rank] = meeting
                self._refuse(fault or f"rank {rank} entered a collective of group {group}, which it is not in", rank)
            if len(meeting.entries) == len(group):
                del self.meetings[group, number]
            else:
                self.waiting[rank] = meeting
                self._refuse_deadlock(rank)
            return meeting

    def _refuse_deadlock(self, rank: int) -> None:
        if self.waiting and len(self.waiting.keys() | self.ended) == self.num_ranks:
            self._refuse("deadlock: no rank can go on", rank)

    def _refuse(self, message: str, rank: int) -> None:
        """Stop all ranks because their collectives do not fit."""
        waits = {}
        for who in range(self.num_ranks):
            busy = "has ended" if who in self.ended else "is running"
            waits[who] = self.waiting[who].describe(who) if who in self.waiting else busy
        self._stop(CollectiveMismatch(message, rank=rank, waits=waits))
        if rank not in self.ended:
            raise Stopped

    def _stop(self, mismatch: CollectiveMismatch | None) -> None:
        if not self.stopped:
            self.stopped, self.mismatch = True, mismatch
        self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self._stop(None)

    def end(self, rank: int, error: BaseException | None) -> None:
        """The rank's thread is over."""
        with self.changed:
            self.waiting.pop(rank, None)
            self.ended.add(rank)
            if error is not None and not isinstance(error, Stopped):
                self.errors[rank] = error
                self._stop(None)
            elif not self.stopped:
                self._refuse_deadlock(rank)
            self.changed.notify_all()

    def wait_for_end(self, grace: float) -> None:
        """Return when every rank has ended, or `grace` seconds after a stop."""
        with self.changed:
            # in short waits: a signal that comes just before a wait begins would not end it
            while not self.changed.wait_for(lambda: self.stopped or len(self.ended) == self.num_ranks, LOOK_UP):
                pass
            self.changed.wait_for(lambda: len(self.ended) == self.num_ranks, grace)

    def raise_failure(self, transports: Sequence[_Emulated]) -> None:
        with self.changed:
            if self.mismatch is not None:
                raise self.mismatch
            for rank in sorted(self.errors):
                raise RankFailed(rank, transports[rank].doing, self.errors[rank])


class _Emulated(Transport):
    """The transport of one emulated rank."""

    def __init__(self, board: _Board, rank: int) -> None:
        self._board = board
        self._calls = Counter[Group]()
        """How many the rank has made in each group."""
        self.rank, self.num_ranks = rank, board.num_ranks
        self.device, self._doing = torch.device("cpu"), Doing()

    @property
    def doing(self) -> Doing:
        return self._doing

    @doing.setter
    def doing(self, doing: Doing) -> None:
        # a rank says what it begins: the moment to end it if all are to stop
        if self._board.stopped:
            raise Stopped
        self._doing = doing

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
        mine = Signature(f"all_reduce({op})", group, self._number(group), alike=tensor.detach())

        def finish(meeting: _Meeting) -> Tensor:
            # every member is inside the call: their tensors cannot change under our hands
            return combine([one.alike for rank in group if (one := meeting.entries[rank]).alike is not None], op)

        with span("all_reduce", self.doing):
            return copied(self._board.meet(self.rank, mine, self.doing, finish).result)

    @torch.no_grad()
    def all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> dict[int, list[Tensor]]:
        copies = {peer: [copied(tensor) for tensor in tensors] for peer, tensors in sends.items()}
        mine = Signature(kind, group, self._number(group), sends=copies, expects=expects)
        with span(kind, self.doing):
            meeting = self._board.meet(self.rank, mine, self.doing)
        return {peer: list(meeting.entries[peer].sends.get(self.rank, ())) for peer in expects}

    @torch.no_grad()
    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        self._board.post(self.rank, peer, tag, [copied(tensor) for tensor in tensors])

    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        found = self._board.take(self.rank, _Message(peer, tag, self.doing))
        there, wanted = text_of(found), text_of(expects)
        assert there == wanted, f"{tag} from rank {peer} is {there}, not {wanted}"
        return found

    def _number(self, group: Group) -> int:
        self._calls[group] += 1
        return self._calls[group] - 1

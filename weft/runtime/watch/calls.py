"""Calls: what one transport of a process has entered, and issued to a device. The watch tells it to the others.

In: the beginning and the end of each call, from the thread that makes it. Out: the calls that are not over, and how
many there were of each kind. A process has a transport for each of its parallel modules; all have one watch
(`watch.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.runtime.watch.states import MAIN, MESSAGES, OPENING, RAISED, Busy, read_state

if TYPE_CHECKING:
    from weft.runtime.watch.watch import Watch

POLL = 0.01
"""Seconds between two looks at what others have said."""


@dataclass(frozen=True)
class Call:
    """A collective that this rank has entered and not left. `what` is put into words when the others are told."""

    key: str
    """Transport, lane and group, and of what there is counted."""
    group: tuple[int, ...]
    number: int
    what: object
    since: float
    timeout: float
    """Seconds that it may take."""

    def told(self) -> list[object]:
        """As it is published."""
        return [self.key, self.number, list(self.group), str(self.what)]


class UnderWay:
    """A call that was issued to a device: whether it is over can be asked, and nobody need wait for it."""

    def __init__(self, call: Call, busy: Busy) -> None:
        self.call, self.busy = call, busy
        self.is_over: Callable[[], bool] = bool
        """Holds no tensor: memory that the program has left is not kept for it."""


class Calls:
    """Those of one transport.

    Args:
        number: of the transport among those of the process, the same on all ranks.
        busy: what the rank does with this transport, or has last done.
        timeout: seconds that one call may take.
    """

    def __init__(self, watch: Watch, number: int, busy: Callable[[], Busy], timeout: float) -> None:
        self.watch, self.busy, self.timeout = watch, busy, timeout
        self.name = str(number)
        self.update = -1
        """The last update, counted from 0, that the rank has made without a word."""
        self.counts = Counter[str]()
        self._lanes: dict[str, Call] = {}
        self._waits_for: str | None = None

    # -- what the rank tells

    def enter(self, lane: str, group: tuple[int, ...], number: int, what: object, kind: str = "") -> None:
        """The rank has entered a collective."""
        key = f"{self.name} {lane} {group}{kind}"
        self.counts[key] = number + 1
        self._lanes[lane] = Call(key, group, number, what, time.monotonic(), self.timeout)
        self.watch.latest = self

    def enter_message(self, lane: str, peer: int, came: int, what: object) -> None:
        """The rank waits for a message, and so many have come from the peer: if more were posted one is under way.

        Called again when another one has come."""
        before = self._lanes.get(lane)
        if before is None or before.number != came:
            self.enter(lane, (self.watch.rank, peer), came, what, MESSAGES)

    def posted(self, lane: str, peer: int) -> None:
        """The rank has left a message for a peer."""
        self.counts[f"{self.name} {lane} {(peer, self.watch.rank)}{MESSAGES}"] += 1

    def leave(self, lane: str) -> None:
        """The rank has the result."""
        self._lanes.pop(lane, None)

    @contextmanager
    def opening(self, lane: str, group: tuple[int, ...]) -> Iterator[None]:
        """The rank makes a way to these ranks, in a call or before it."""
        before = self._lanes.get(lane)
        if before is None:
            number = self.counts[f"{self.name} {lane} {group}{OPENING}"]
            self.enter(lane, group, number, "the first call", OPENING)
        yield
        if before is None:
            self.leave(lane)

    def issued(self, key: str, group: tuple[int, ...], what: object) -> UnderWay:
        """The rank has issued a collective to its device, and goes on."""
        key = f"{self.name} {key}"
        number = self.counts[key]
        self.counts[key] = number + 1
        found = UnderWay(Call(key, group, number, what, time.monotonic(), self.timeout), self.busy())
        self.watch.latest = self
        self.watch.under_way.append(found)
        return found

    def wait_for(self, lane: str | None) -> None:
        """The rank waits for what it started on another lane, or no longer."""
        self._waits_for = lane

    def raised(self, number: int, error: str) -> bool:
        """The rank raises an error in a call that all ranks make, for so many-th time: whether all do.

        Waits for them, as in a collective, as long as one may take."""
        until, everyone = time.monotonic() + self.timeout, tuple(range(self.watch.num_ranks))
        keys = [f"raised/{self.name}/{number}/{rank}" for rank in everyone]
        self.watch.store.set(keys[self.watch.rank], error)
        self.enter(MAIN, everyone, number, error, RAISED)
        while not self.watch.store.check(keys):
            if self.watch.is_stopped or time.monotonic() > until:
                self.watch.is_told = True
                return False
            time.sleep(POLL)
        self.leave(MAIN)
        return True

    def compared(self, update: int, mine: float, group: tuple[int, ...]) -> dict[int, float | None]:
        """What members say before an update; None: one has passed it, and says nothing.

        By the store: who has nothing to say does not come to a collective."""
        until, store, name = time.monotonic() + self.timeout, self.watch.store, f"update/{self.name}/{update}"
        store.set(f"{name}/{self.watch.rank}", repr(mine))
        self.watch.tell()
        found: dict[int, float | None] = {self.watch.rank: mine}
        while len(found) < len(group):
            self.watch.check()
            for rank in group:
                # asked in this order: who has said something has passed too
                made = read_state(store, rank).get("updates", {}) if rank not in found else {}
                if rank not in found and store.check([f"{name}/{rank}"]):
                    found[rank] = float(store.get(f"{name}/{rank}"))
                elif made.get(self.name, -1) >= update:
                    found[rank] = None
            if time.monotonic() > until:
                break
            time.sleep(POLL)
        return {rank: found.get(rank) for rank in group}

    # -- what is known of it

    def entered(self) -> list[Call]:
        """Those that the host is in."""
        return list(self._lanes.values())

    def waits_in(self) -> Call | None:
        """The one that the rank's own thread waits for."""
        waits_for = self._waits_for
        return self._lanes.get(MAIN if waits_for is None else waits_for)

    def gone(self, peer: int) -> str:
        """That a rank has gone, and what this one was in."""
        calls = [f" in {call.what}, call {call.number} of group {call.group}" for call in self.entered()]
        return f"rank {peer} has gone; rank {self.watch.rank} was{calls[0] if calls else ''} ({self.busy()})"

"""Watch: what each process of a job is doing, told to all the others, so that no failure is waited for.

In: the calls that this rank enters and leaves, or issues to a device, and its failure if it has one. Out: the end of a
wait that is in vain. A thread publishes this rank's state in the job's store several times a second and reads the
others'. It stops the rank when another one failed; when no rank can go on (every rank waits in a call that some member
has not entered, or has ended); when a call takes longer than it may, whoever waits for it, the host or the device; and
if the rank does not stop by itself, being inside a long computation or waiting for its device, it ends the process.

Promised: a deadlock is only called one if each rank was seen waiting in the same calls before and after one moment. The
time of a call on a device begins when those issued before it are over.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch.distributed as dist

from weft.errors import RunError
from weft.runtime.links.backend import Store, own_connection
from weft.runtime.links.transport import ALIKE, CollectiveMismatch, Doing, PeerFailed, Stopped, told_waits
from weft.runtime.watch.progress import Progress
from weft.runtime.watch.states import (
    MESSAGES,
    RAISED,
    Failure,
    alone,
    describe,
    failure_key,
    failure_of,
    is_deadlock,
    missing,
    moved,
    read_state,
    read_states,
    state_key,
)

PULSE = 0.2
"""Seconds between two looks; of the store longer ones in jobs of many ranks, which share it."""
STALL = 0.8
"""Seconds that a call may take before the others' states are looked at."""
POLL = 0.01
"""Seconds between two looks for whether others have raised too."""
GRACE = 2.0
"""Seconds that a stopped rank gets to come to its next collective before its process is ended."""
OPENING = " opening"
FEW = 4
"""Calls under way on a device that are told."""
FIRST = "see what that rank raised; all ranks of a job end together, and are started together"
ENDED_BY_WATCH = 70
"""Exit code of a process that did not stop by itself."""
STORE_LOST = 71
"""Exit code of a process whose launcher has gone."""


@dataclass(frozen=True)
class Call:
    """A collective that this rank has entered and not left. `what` is put into words when the others are told."""

    key: str
    """Lane and group, and of what there is counted."""
    group: tuple[int, ...]
    number: int
    what: object
    since: float


class UnderWay:
    """A call that was issued to a device: whether it is over can be asked, and nobody need wait for it."""

    def __init__(self, call: Call, doing: Doing, step: int | None) -> None:
        self.call, self.doing, self.step = call, doing, step
        self.is_over: Callable[[], bool] = bool
        """Holds no tensor: memory that the program has left is not kept for it."""


class Watch:
    """One rank's view of a job.

    Args:
        store: of this job alone; the watch uses a connection of its own.
        doing: what the rank is busy with, and in which step.
        timeout: seconds that one call may take.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        doing: Callable[[], tuple[Doing, int | None]],
        timeout: float = math.inf,
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._store, self._doing, self._timeout = own_connection(store), doing, timeout
        self._calls: dict[str, Call] = {}
        self._under_way = deque[UnderWay]()
        self._passed = 0.0
        """When the last call of a device was over."""
        self.ends: Callable[[RunError], None] = lambda error: None
        """Is told why the process is ended, where the rank does not stop by itself."""
        self._counts = Counter[str]()
        self._waits_for: str | None = None
        self._beats = 0
        self._seen: dict[int, dict[str, Any]] = {}
        self._stopped_at: float | None = None
        self.progress = Progress()
        self.update = -1
        """The last update, counted from 0, that the rank has made without a word."""
        self._is_told = False
        """The rank has heard of it: when it ends is its own affair."""
        self._mismatch: CollectiveMismatch | None = None
        self._other = PeerFailed("another rank failed", remedy=FIRST)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch of rank {rank}", daemon=True)
        self._publish("running")
        self._thread.start()

    # -- what the rank tells

    def enter(self, lane: str, group: tuple[int, ...], number: int, what: object, kind: str = "") -> None:
        """The rank has entered a collective."""
        key = f"{lane} {group}{kind}"
        self._counts[key] = number + 1
        self._calls[lane] = Call(key, group, number, what, time.monotonic())

    def enter_message(self, lane: str, peer: int, came: int, what: object) -> None:
        """The rank waits for a message, and so many have come from the peer: if more were posted one is under way.

        Called again when another one has come."""
        before = self._calls.get(lane)
        if before is None or before.number != came:
            self.enter(lane, (self.rank, peer), came, what, MESSAGES)

    def posted(self, lane: str, peer: int) -> None:
        """The rank has left a message for a peer."""
        self._counts[f"{lane} {(peer, self.rank)}{MESSAGES}"] += 1

    def leave(self, lane: str) -> None:
        """The rank has the result."""
        self._calls.pop(lane, None)

    @contextmanager
    def opening(self, lane: str, group: tuple[int, ...]) -> Iterator[None]:
        """The rank makes a way to these ranks, in a call or before it."""
        before = self._calls.get(lane)
        if before is None:
            self.enter(lane, group, self._counts[f"{lane} {group}{OPENING}"], "the first call", OPENING)
        yield
        if before is None:
            self.leave(lane)

    def issued(self, key: str, group: tuple[int, ...], what: object) -> UnderWay:
        """The rank has issued a collective to its device, and goes on."""
        number = self._counts[key]
        self._counts[key] = number + 1
        found = UnderWay(Call(key, group, number, what, time.monotonic()), *self._doing())
        self._under_way.append(found)
        return found

    def wait_for(self, lane: str | None) -> None:
        """The rank waits for what it started on another lane, or no longer."""
        self._waits_for = lane

    def check(self) -> None:
        """Called by a rank that waits: raises if there is nothing to wait for."""
        if self._mismatch is not None:
            self._is_told = True
            raise self._mismatch
        if self._stopped_at is not None:
            self._is_told = True
            # where nobody catches it the rank that failed says all there is to say
            raise PeerFailed(self._other.message, remedy=self._other.remedy) from Stopped()

    def _of_another(self) -> PeerFailed:
        """What the rank that failed first has told, as far as that can be said."""
        found = [rank for rank in range(self.num_ranks) if self._store.check([failure_key(rank)])]
        if not found:
            return self._other
        failure = Failure.from_json(self._store.get(failure_key(found[0])))
        if failure.sort == "mismatch":
            return PeerFailed("\n".join([failure.message, *told_waits(failure.waits)]), remedy=ALIKE)
        first = failure.message.splitlines()[0] if failure.message else ""
        return PeerFailed(f"rank {found[0]} failed: {failure.error}: {first}", remedy=FIRST)

    def raised(self, number: int, error: str, until: float) -> bool:
        """The rank raises an error in a call that all ranks make, for so many-th time: whether all do.

        Waits for them, as in a collective, until so many seconds by the clock."""
        everyone = tuple(range(self.num_ranks))
        keys = [f"raised/{number}/{rank}" for rank in everyone]
        self._store.set(keys[self.rank], error)
        self.enter(MAIN, everyone, number, error, RAISED)
        while not self._store.check(keys):
            if self._stopped_at is not None or time.monotonic() > until:
                self._is_told = True
                return False
            time.sleep(POLL)
        self.leave(MAIN)
        return True

    def compared(self, update: int, mine: float, group: tuple[int, ...], until: float) -> dict[int, float | None]:
        """What members say before an update; None: one has passed it, and says nothing.

        By the store: who has nothing to say does not come to a collective."""
        self._store.set(f"update/{update}/{self.rank}", repr(mine))
        self.tell()
        found: dict[int, float | None] = {self.rank: mine}
        while len(found) < len(group):
            self.check()
            for rank in group:
                # asked in this order: who has said something has passed too
                has_passed = rank not in found and read_state(self._store, rank).get("update", -1) >= update
                if rank not in found and self._store.check([f"update/{update}/{rank}"]):
                    found[rank] = float(self._store.get(f"update/{update}/{rank}"))
                elif has_passed:
                    found[rank] = None
            if time.monotonic() > until:
                break
            time.sleep(POLL)
        return {rank: found.get(rank) for rank in group}

    def fail(self, failure: Failure) -> None:
        """The rank failed: tell the others."""
        self.tell()
        self._store.set(failure_key(failure.rank), failure.to_json())
        self._store.set(FAILED, "1")

    def tell(self) -> None:
        """Publish the rank's state now."""
        self._publish("running" if self._blocked_since() is None else "blocked")

    def close(self) -> None:
        """The rank has ended; it no longer watches."""
        self._over.set()
        self._thread.join()
        with suppress(dist.DistError):
            # whoever kept the store may have ended first: nobody is left to be told then
            self._publish("ended")

    # -- what it learns

    def waits(self) -> dict[int, str]:
        """What every rank is doing, in words."""
        self.tell()
        return describe(read_states(self._store, self.num_ranks))

    def gone(self, peer: int) -> str:
        """That a rank has gone, and what this one was in."""
        doing, step = self._doing()
        calls = [f" in {call.what}, call {call.number} of group {call.group}" for call in list(self._calls.values())]
        return f"rank {peer} has gone; rank {self.rank} was{calls[0] if calls else ''} ({doing}, step {step})"

    def say(self, key: str, text: str) -> None:
        """Leave a word for the others."""
        self._store.set(key, text)

    def hear(self, key: str) -> str:
        """A word that another rank leaves; "" if it does not come."""
        until = time.monotonic() + GRACE
        while not self._store.check([key]):
            if time.monotonic() > until:
                return ""
            time.sleep(0.02)
        return self._store.get(key).decode()

    # -- the thread

    def _run(self) -> None:
        beat = max(1, self.num_ranks // 16)
        try:
            for turn in count():
                if self._over.wait(PULSE):
                    return
                self._look_at_time()
                if turn % beat == 0:
                    self._beat()
        except dist.DistError:
            if not self._over.is_set():
                gone = PeerFailed("rank 0, or the launcher, has gone", remedy=FIRST)
                self.ends(gone if self._stopped_at is None else self._mismatch or self._other)
                os._exit(STORE_LOST)

    def _look_at_time(self) -> None:
        if self._stopped_at is None:
            late = self._late()
            if late is not None:
                self._end_late(late)
        elif not self._is_told and time.monotonic() - self._stopped_at > GRACE:
            self.ends(self._mismatch or self._other)
            os._exit(ENDED_BY_WATCH)

    def _beat(self) -> None:
        blocked_since = self._blocked_since()
        self._publish("running" if blocked_since is None else "blocked")
        if self._stopped_at is not None:
            return
        if self._store.check([FAILED]):
            # now: who keeps the store may end too
            self._other = self._of_another()
            self._stopped_at = time.monotonic()
        elif blocked_since is not None and time.monotonic() - blocked_since > STALL:
            self._look_for_deadlock()
        else:
            self._seen = {}
            self._compare_progress()

    def _late(self) -> Call | None:
        """A call that takes longer than it may."""
        while self._under_way and self._under_way[0].is_over():
            self._under_way.popleft()
            self._passed = time.monotonic()
        # whoever raised knows for how long to wait for the others
        calls = [(call.since, call) for call in list(self._calls.values()) if not call.key.endswith(RAISED)]
        if self._under_way:
            call = self._under_way[0].call
            calls.append((max(call.since, self._passed), call))
        until = time.monotonic() - self._timeout
        return next((call for since, call in calls if since < until), None)

    def _end_late(self, call: Call) -> None:
        self.tell()
        states = read_states(self._store, self.num_ranks)
        if call.key.endswith(MESSAGES):
            what = f"{str(call.what).removeprefix('wait for ')} from rank {call.group[1]}"
        else:
            absent = " and ".join(map(str, missing(states, [call.key, call.number, call.group, ""])))
            lacks = f", which rank {absent} has not entered" if absent else ""
            what = f"{call.what}, call {call.number} of group {call.group}{lacks}"
        self._end(f"rank {self.rank} waited {self._timeout:g} s for {what}", states)

    def _compare_progress(self) -> None:
        for rank in self.progress.references() - {self.rank}:
            found = self.progress.difference(rank, read_state(self._store, rank).get("progress", ()))
            if found is not None:
                number, mine, theirs = found
                self._end(
                    f"before the training step that is number {number} of the module, rank {self.rank} has made {mine} "
                    f"updates, rank {rank} {theirs}: one of them has left out a backward or optimizer.step()",
                    read_states(self._store, self.num_ranks),
                )
                return

    def _end(self, message: str, states: Mapping[int, Mapping[str, Any]]) -> None:
        """The ranks do not do the same: this one says so, and all end."""
        self._mismatch = CollectiveMismatch(message, rank=self.rank, waits=describe(states))
        self._stopped_at = time.monotonic()
        self.fail(failure_of(self.rank, self._mismatch, *self._doing()))

    def _blocked_since(self) -> float | None:
        """When the rank's own thread entered the call that it waits for."""
        waits_for = self._waits_for
        call = self._calls.get(MAIN if waits_for is None else waits_for)
        return None if call is None else call.since

    def _publish(self, state: str) -> None:
        (doing, step), stalled = self._doing(), time.monotonic() - STALL
        # calls name tensors: none is held while the store is waited for
        calls = [[call.key, call.number, list(call.group), str(call.what)] for call in list(self._calls.values())]
        waits = [one for one in list(self._under_way)[:FEW] if one.call.since < stalled]
        if waits and not calls:
            # wherever the host is by now: this is what the rank waits for
            doing, step = waits[0].doing, waits[0].step
        calls += [[one.call.key, one.call.number, list(one.call.group), str(one.call.what)] for one in waits]
        self._beats += 1
        found = {
            "beat": self._beats,
            "state": state,
            "doing": str(doing) if step is None else f"{doing}, step {step}",
            "calls": calls,
            "counts": dict(self._counts),
            "what": doing.what,
            "place": doing.place,
            "step": step,
            "update": self.update,
            "progress": self.progress.told(),
        }
        self._store.set(state_key(self.rank), json.dumps(found))

    def _look_for_deadlock(self) -> None:
        states = read_states(self._store, self.num_ranks)
        if not is_deadlock(states, self.num_ranks):
            self._seen = {}
            return
        if not self._seen or any(moved(self._seen[rank], states[rank]) for rank in states):
            self._seen = states
            return
        if all(s["state"] == "ended" or s["beat"] >= self._seen[rank]["beat"] + 2 for rank, s in states.items()):
            self._end(alone(states) or "deadlock: no rank can go on", states)


MAIN = "main"
"""The lane of the calls that a rank makes itself."""
FAILED = "failed"

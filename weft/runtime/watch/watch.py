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
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

import torch.distributed as dist

from weft.errors import RunError
from weft.runtime.links.backend import Store, own_connection
from weft.runtime.links.transport import ALIKE, CollectiveMismatch, PeerFailed, Stopped, told_waits
from weft.runtime.program.lines import place_of
from weft.runtime.watch.calls import Call, Calls, UnderWay
from weft.runtime.watch.progress import Progress
from weft.runtime.watch.states import (
    MESSAGES,
    RAISED,
    Busy,
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
GRACE = 2.0
"""Seconds that a stopped rank gets to come to its next collective before its process is ended."""
FEW = 4
"""Calls under way on a device that are told."""
FIRST = "see what that rank raised; all ranks of a job end together, and are started together"
ENDED_BY_WATCH = 70
"""Exit code of a process that did not stop by itself."""
STORE_LOST = 71
"""Exit code of a process whose launcher has gone."""


class Watch:
    """One rank's view of a job, whatever transports it has there.

    Args:
        store: of this job alone; the watch uses a connection of its own.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.store = own_connection(store)
        self._calls: list[Calls] = []
        self._open: set[Calls] = set()
        self.latest: Calls | None = None
        """Of the transport that was used last."""
        self.under_way = deque[UnderWay]()
        self._passed = 0.0
        """When the last call of a device was over."""
        self.ends: Callable[[RunError], None] = lambda error: None
        """Is told why the process is ended, where the rank does not stop by itself."""
        self._beats = 0
        self._seen: dict[int, dict[str, Any]] = {}
        self._stopped_at: float | None = None
        self.progress = Progress()
        self.is_told = False
        """The rank has heard of it: when it ends is its own affair."""
        self._mismatch: CollectiveMismatch | None = None
        self._other = PeerFailed("another rank failed", remedy=FIRST)
        self._over, self._owner = threading.Event(), threading.get_ident()
        self._thread = threading.Thread(target=self._run, name=f"watch of rank {rank}", daemon=True)
        self._publish("running")
        self._thread.start()

    def open(self, busy: Callable[[], Busy], timeout: float) -> Calls:
        """A further transport: the calls that it will make. All ranks open theirs in one order."""
        found = Calls(self, len(self._calls), busy, timeout)
        self._open.add(found)
        # what one has made stays known when it is closed: others may still be in the last of them
        self._calls = [*self._calls, found]
        self.latest = found
        return found

    @property
    def is_shared(self) -> bool:
        """There are several transports."""
        return len(self._calls) > 1

    @property
    def is_stopped(self) -> bool:
        """The rank is not to go on."""
        return self._stopped_at is not None

    @property
    def busy(self) -> Busy:
        """What the rank does, in which step: where it waits, else where it last used a transport."""
        known = next((one for one in self._calls if one.waits_in() is not None), self.latest)
        return Busy() if known is None else known.busy()

    # -- what the rank tells

    def check(self) -> None:
        """Called by a rank that waits: raises if there is nothing to wait for."""
        if self._mismatch is not None:
            self.is_told = True
            raise self._mismatch
        if self._stopped_at is not None:
            self.is_told = True
            # where nobody catches it the rank that failed says all there is to say
            raise PeerFailed(self._other.message, remedy=self._other.remedy) from Stopped()

    def _of_another(self) -> PeerFailed:
        """What the rank that failed first has told, as far as that can be said."""
        found = [rank for rank in range(self.num_ranks) if self.store.check([failure_key(rank)])]
        if not found:
            return self._other
        failure = Failure.from_json(self.store.get(failure_key(found[0])))
        if failure.sort == "mismatch":
            return PeerFailed("\n".join([failure.message, *told_waits(failure.waits)]), remedy=ALIKE)
        first = failure.message.splitlines()[0] if failure.message else ""
        return PeerFailed(f"rank {found[0]} failed: {failure.error}: {first}", remedy=FIRST)

    def fail(self, failure: Failure) -> None:
        """The rank failed: tell the others."""
        self.tell()
        self.store.set(failure_key(failure.rank), failure.to_json())
        self.store.set(FAILED, "1")

    def tell(self) -> None:
        """Publish the rank's state now."""
        self._publish("running" if self._blocked_since() is None else "blocked")

    def close(self, calls: Calls) -> None:
        """One of the rank's transports is closed. With the last of them the rank has ended: it no longer watches."""
        self._open.discard(calls)
        if self._open:
            return
        self._over.set()
        self._thread.join()
        with suppress(dist.DistError):
            # whoever kept the store may have ended first: nobody is left to be told then
            self._publish("ended")

    # -- what it learns

    def waits(self) -> dict[int, str]:
        """What every rank is doing, in words."""
        self.tell()
        return describe(read_states(self.store, self.num_ranks))

    def say(self, key: str, text: str) -> None:
        """Leave a word for the others."""
        self.store.set(key, text)

    def hear(self, key: str) -> str:
        """A word that another rank leaves; "" if it does not come."""
        until = time.monotonic() + GRACE
        while not self.store.check([key]):
            if time.monotonic() > until:
                return ""
            time.sleep(0.02)
        return self.store.get(key).decode()

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
        elif not self.is_told and time.monotonic() - self._stopped_at > GRACE:
            self.ends(self._mismatch or self._other)
            os._exit(ENDED_BY_WATCH)

    def _beat(self) -> None:
        blocked_since = self._blocked_since()
        self._publish("running" if blocked_since is None else "blocked")
        if self._stopped_at is not None:
            return
        if self.store.check([FAILED]):
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
        while self.under_way and self.under_way[0].is_over():
            self.under_way.popleft()
            self._passed = time.monotonic()
        # whoever raised knows for how long to wait for the others
        calls = [(one.since, one) for one in self._entered() if not one.key.endswith(RAISED)]
        if self.under_way:
            call = self.under_way[0].call
            calls.append((max(call.since, self._passed), call))
        now = time.monotonic()
        return next((call for since, call in calls if since + call.timeout < now), None)

    def _end_late(self, call: Call) -> None:
        self.tell()
        states = read_states(self.store, self.num_ranks)
        if call.key.endswith(MESSAGES):
            what = f"{str(call.what).removeprefix('wait for ')} from rank {call.group[1]}"
        else:
            absent = " and ".join(map(str, missing(states, [call.key, call.number, call.group, ""])))
            lacks = f", which rank {absent} has not entered" if absent else ""
            what = f"{call.what}, call {call.number} of group {call.group}{lacks}"
        self._end(f"rank {self.rank} waited {call.timeout:g} s for {what}", states)

    def _compare_progress(self) -> None:
        for rank in self.progress.references() - {self.rank}:
            found = self.progress.difference(rank, read_state(self.store, rank).get("progress", ()))
            if found is not None:
                number, mine, theirs = found
                self._end(
                    f"before the training step that is number {number} of the module, rank {self.rank} has made {mine} "
                    f"updates, rank {rank} {theirs}: one of them has left out a backward or optimizer.step()",
                    read_states(self.store, self.num_ranks),
                )
                return

    def _end(self, message: str, states: Mapping[int, Mapping[str, Any]]) -> None:
        """The ranks do not do the same: this one says so, and all end."""
        self._mismatch = CollectiveMismatch(message, rank=self.rank, waits=describe(states))
        self._stopped_at = time.monotonic()
        self.fail(failure_of(self.rank, self._mismatch, self.busy))

    def _blocked_since(self) -> float | None:
        """When the rank's own thread entered the call that it waits for."""
        return next((call.since for one in self._calls if (call := one.waits_in()) is not None), None)

    def _entered(self) -> list[Call]:
        """The calls that the host is in; those of the transport for which it waits first."""
        return [call for one in sorted(self._calls, key=lambda one: one.waits_in() is None) for call in one.entered()]

    def _publish(self, state: str) -> None:
        busy, stalled = self.busy, time.monotonic() - STALL
        # calls name tensors: none is held while the store is waited for
        calls = [one.told() for one in self._entered()]
        waits = [one for one in list(self.under_way)[:FEW] if one.call.since < stalled]
        if waits and not calls:
            # wherever the host is by now: this is what the rank waits for
            busy = waits[0].busy
        calls += [one.call.told() for one in waits]
        now = place_of(self._owner) if state == "running" else ""
        self._beats += 1
        found = {
            "beat": self._beats,
            "state": state,
            "doing": f"{busy}{now and f', now at {now}'}",
            "calls": calls,
            "counts": {key: count for one in self._calls for key, count in dict(one.counts).items()},
            "what": busy.doing.what,
            "place": busy.doing.place,
            "step": busy.step,
            "updates": {one.name: one.update for one in self._calls},
            "progress": self.progress.told(),
        }
        self.store.set(state_key(self.rank), json.dumps(found))

    def _look_for_deadlock(self) -> None:
        states = read_states(self.store, self.num_ranks)
        if not is_deadlock(states, self.num_ranks):
            self._seen = {}
            return
        if not self._seen or any(moved(self._seen[rank], states[rank]) for rank in states):
            self._seen = states
            return
        if all(s["state"] == "ended" or s["beat"] >= self._seen[rank]["beat"] + 2 for rank, s in states.items()):
            self._end(alone(states) or "deadlock: no rank can go on", states)


FAILED = "failed"

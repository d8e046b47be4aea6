"""Pipes: bytes between the processes of one host, without a network layer.

In: for each member of a group the bytes that go to it, and where the bytes that come from it are to be put. Out: they
are there. A pipe leads from each member to each other one; what one sends to another arrives in the order of sending.
An exchange is begun, and ends when it is waited for; what does not fit into a pipe goes on whenever the rank waits for
anything.

Promised: no wait outlives its reason: while nothing comes somebody may look, and a member that is gone ends it at once.
Members find each other's pipes by number and make sure that they are the ones that were meant; where one cannot, there
are none (`meet` gives None), on any member.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from weft.runtime.links.backend import Store
from weft.runtime.links.transport import PeerLost

SPIN = 1e-4
"""Seconds in which a rank that waits does not sleep."""
READ = 64 << 10
"""Bytes that are read at a time."""
MEETING = 1e-3
"""Seconds between two looks for a member that is to come."""
LOOK = 100
"""Milliseconds between two looks at whether a wait is in vain."""


@dataclass(eq=False)
class Exchange:
    """Bytes under way: how many are still to be sent or to come. Holds the tensors whose memory that is."""

    missing: int
    tensors: tuple[Tensor, ...]


Queue = deque[tuple[memoryview, Exchange]]


class Pipes:
    """The pipes of one rank in one group. For one thread at a time.

    Args:
        incoming, outgoing: descriptors by position of the other member.

    Attributes:
        told: says which member has gone, by its position.
    """

    def __init__(self, incoming: Mapping[int, int], outgoing: Mapping[int, int]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self.told: Callable[[int], str] = "member {} of the group has gone".format
        self._to_send: dict[int, Queue] = {at: deque() for at in outgoing}
        self._to_come: dict[int, Queue] = {at: deque() for at in incoming}

    def carry(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Exchange:
        """Begin an exchange: a contiguous tensor for each member, and one for what comes from each. Its own are left
        out."""
        exchange = Exchange(0, (*outgoing, *incoming))
        for queues, tensors in ((self._to_send, outgoing), (self._to_come, incoming)):
            for at, tensor in enumerate(tensors):
                if at in queues and tensor.nbytes:
                    queues[at].append((_bytes_of(tensor), exchange))
                    exchange.missing += tensor.nbytes
        self.push()
        return exchange

    def wait(self, exchange: Exchange, look: Callable[[], None]) -> None:
        """Until all of an exchange is sent and there. `look` is called now and then; it raises if that is in vain."""
        self._turn()
        until = time.perf_counter() + SPIN
        while exchange.missing and time.perf_counter() < until:
            # to be woken costs more than a short time without sleep
            os.sched_yield()
            self._turn()
        while exchange.missing:
            if not self._sleep():
                look()
            self._turn()

    def write(self, at: int, data: bytes) -> None:
        """Send bytes to a member, and do not wait."""
        self._to_send[at].append((memoryview(data), Exchange(len(data), ())))
        self.push()

    def read(self, at: int, look: Callable[[], None]) -> bytes:
        """What has come from a member and belongs to no exchange; waits for some."""
        until = time.perf_counter() + SPIN
        while True:
            self.push()
            try:
                found = os.read(self._incoming[at], READ)
            except BlockingIOError:
                if time.perf_counter() < until:
                    os.sched_yield()
                elif not self._sleep(at):
                    look()
                continue
            if not found:
                raise PeerLost(self.told(at))
            return found

    def close(self) -> None:
        """There will be no further exchange."""
        for descriptor in (*self._incoming.values(), *self._outgoing.values()):
            os.close(descriptor)
        self._incoming = self._outgoing = {}

    @property
    def sent(self) -> bool:
        """Whether all that was written is in the pipes."""
        return not any(self._to_send.values())

    def push(self) -> None:
        """Send what fits into the pipes now."""
        for at, queue in self._to_send.items():
            while queue:
                try:
                    done = os.write(self._outgoing[at], queue[0][0])
                except BlockingIOError:
                    break
                except BrokenPipeError as error:
                    raise PeerLost(self.told(at)) from error
                _advance(queue, done)

    def _receive(self) -> None:
        for at, queue in self._to_come.items():
            while queue:
                try:
                    done = os.readv(self._incoming[at], [queue[0][0]])
                except BlockingIOError:
                    break
                if not done:
                    raise PeerLost(self.told(at))
                _advance(queue, done)

    def _turn(self) -> None:
        """Do what can be done now."""
        self.push()
        self._receive()

    def _sleep(self, at: int | None = None) -> bool:
        """Until something can be done, or something comes from a member; False if nothing could for a while."""
        poll = select.poll()
        for member, queue in self._to_come.items():
            if queue or member == at:
                poll.register(self._incoming[member], select.POLLIN)
        for member, queue in self._to_send.items():
            if queue:
                poll.register(self._outgoing[member], select.POLLOUT)
        return bool(poll.poll(LOOK))


def meet(store: Store, position: int, num_members: int, look: Callable[[], None] = lambda: None) -> Pipes | None:
    """The pipes between the members, who all meet in a store of theirs; None if some member cannot reach another's.

    Args:
        look: called while waiting for them; raises if that is in vain.
    """
    ends = {at: os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) for at in range(num_members) if at != position}
    mine = {at: (os.getpid(), write, os.fstat(write).st_ino) for at, (_, write) in ends.items()}
    store.set(f"pipes/{position}", json.dumps(mine))
    theirs = {at: json.loads(_heard(store, f"pipes/{at}", look))[str(position)] for at in ends}
    opened = {at: _opened(*end) for at, end in theirs.items()}
    outgoing = {at: descriptor for at, descriptor in opened.items() if descriptor is not None}
    store.set(f"pipes reached/{position}", str(int(len(outgoing) == len(ends))))
    agreed = {_heard(store, f"pipes reached/{at}", look) for at in range(num_members)} == {b"1"}
    for _, write in ends.values():
        # only others may hold the end for writing: when they are gone, so is the pipe
        os.close(write)
    pipes = Pipes({at: read for at, (read, _) in ends.items()}, outgoing)
    if not agreed:
        pipes.close()
    return pipes if agreed else None


def _heard(store: Store, key: str, look: Callable[[], None]) -> bytes:
    """A word that another member leaves."""
    while not store.check([key]):
        look()
        time.sleep(MEETING)
    return store.get(key)


def _opened(pid: int, descriptor: int, number: int) -> int | None:
    """The end of another process's pipe; None if it cannot be reached from here, or another one is there."""
    with suppress(OSError):
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(opened)
        if stat.S_ISFIFO(found.st_mode) and found.st_ino == number:
            return opened
        os.close(opened)
    return None


def _advance(queue: Queue, done: int) -> None:
    """The first of a queue has gone on by so many bytes."""
    view, exchange = queue.popleft()
    exchange.missing -= done
    if done < len(view):
        queue.appendleft((view[done:], exchange))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")

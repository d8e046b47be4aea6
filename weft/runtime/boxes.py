"""Boxes: large messages between the processes of one host lie in shared memory, and only a note of where travels.

In: the bytes that go to each member of a group, and memory for what comes from each. Out: the bytes that came. A
message of at least `LARGE` bytes is copied into a box of the sender; in its place a pipe (pipes.py) carries a note, so
both sides know from the size alone how a message travels. The taker copies it out and writes into the box that it has
it; a box whose takers have all done so is used again.

Promised: a box is memory without a file and ends with its owner and those who look into it, however they end.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.runtime.pipes import Exchange, Pipes
from weft.runtime.watch import PeerLost

LARGE = 64 << 10
"""Bytes from which on a message is laid into a box. A pipe of Linux holds as many."""
ALIGNED = 4096
NOTE = struct.Struct("<qqqqqq")
"""The box: process, descriptor, serial number, size. The message in it: number, where it begins."""
TAKEN = struct.Struct("<q")
PAUSE = 5e-5
"""Seconds between two looks for a free box."""
LAST = 5.0
"""Seconds that an ending rank waits for others to take what they were sent; those that are gone never will."""
FEW = 3
"""Boxes that may wait for their takers before the sender waits too. A sum in two rounds (sums.py) begins three
exchanges before members surely have ended the first: with fewer boxes they would wait for each other."""


@dataclass
class Box:
    """Shared memory of one sender. Its first bytes are the takers' marks: the number of the last message they took.

    `number`: of the message that is in it; `takers`: positions in the group of those that it is for. Descriptors are
    used again for other boxes, serial numbers are not."""

    descriptor: int
    serial: int
    mapping: mmap.mmap
    number: int = 0
    takers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.memory = torch.frombuffer(self.mapping, dtype=torch.uint8)

    @property
    def size(self) -> int:
        return self.memory.numel()

    def look_away(self) -> None:
        """Until the next look its memory does not count as this process's too."""
        self.mapping.madvise(mmap.MADV_DONTNEED)

    def is_free(self) -> bool:
        """True if all have taken what was for them."""
        return all(self.mark(taker) == self.number for taker in self.takers)

    def mark(self, position: int) -> int:
        # by system calls, not through the mapping: they order what is written before and after them
        return int(TAKEN.unpack(os.pread(self.descriptor, TAKEN.size, position * TAKEN.size))[0])

    def set_mark(self, position: int, number: int) -> None:
        os.pwrite(self.descriptor, TAKEN.pack(number), position * TAKEN.size)


@dataclass
class Passage:
    """An exchange under way: the pipes' part of it, what that brings, and where what lies in boxes is to be put."""

    exchange: Exchange
    brought: list[Tensor]
    sizes: Sequence[int]
    incoming: Sequence[Tensor] | None


class Boxes:
    """The boxes of one rank in one group.

    Args:
        position: of this rank among the members.
        look: called while waiting for others; raises if that is in vain.
    """

    def __init__(self, position: int, num_members: int, pipes: Pipes, look: Callable[[], None]) -> None:
        self.position, self.num_members = position, num_members
        self._pipes, self._look = pipes, look
        self._own: list[Box] = []
        self._theirs: dict[tuple[int, int], Box] = {}
        self._number, self._serial = 0, 0

    @property
    def marks(self) -> int:
        """Bytes of a box before its first message."""
        return _marks(self.num_members)

    def begin(
        self,
        outgoing: Sequence[Tensor],
        sizes: Sequence[int],
        incoming: Sequence[Tensor] | None = None,
        *,
        same: bool = False,
    ) -> Passage:
        """Begin an exchange.

        Args:
            outgoing: flat bytes for each member.
            sizes: bytes that come from each.
            incoming: is filled when it ends; None if what comes will only be looked at.
            same: all members for which there is something get the same.
        """
        messages = list(outgoing)
        if incoming is not None and sizes[self.position]:
            incoming[self.position].copy_(messages[self.position])
        large = [at for at, message in enumerate(messages) if self._boxed(at, message.numel())]
        if large:
            self._put_in_box(messages, large, same=same)
        brought = []
        for at, size in enumerate(sizes):
            own = at == self.position
            if incoming is None or own or self._boxed(at, size):
                length = 0 if own else NOTE.size if self._boxed(at, size) else size
                brought.append(torch.empty(length, dtype=torch.uint8))
            else:
                brought.append(incoming[at])
        return Passage(self._pipes.carry(messages, brought), brought, sizes, incoming)

    def finish(self, passage: Passage) -> None:
        """Wait for an exchange, and fetch what lies in boxes."""
        found, release = self.look(passage)
        assert passage.incoming is not None
        for at, into in enumerate(passage.incoming):
            if self._boxed(at, passage.sizes[at]):
                into.copy_(found[at])
        release()

    def look(self, passage: Passage) -> tuple[list[Tensor], Callable[[], None]]:
        """Wait for an exchange: what came from each member, where it lies, and what to call after the last look."""
        self._pipes.wait(passage.exchange, self._look)
        found = list(passage.brought)
        taken: list[tuple[Box, int]] = []
        for at, size in enumerate(passage.sizes):
            if self._boxed(at, size):
                box, number, start = self.opened(found[at])
                found[at] = box.memory[start : start + size]
                taken.append((box, number))

        def release() -> None:
            for box, number in taken:
                box.set_mark(self.position, number)

        return found, release

    def tell(self, words: Tensor) -> list[Tensor]:
        """A few bytes to all members, and as many from each."""
        came = [torch.empty_like(words) for _ in range(self.num_members)]
        self.pass_small([words] * self.num_members, came)
        return came

    def pass_small(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """An exchange of contiguous tensors of less than `LARGE` bytes each, as they lie. `begin` sends them alike."""
        self._pipes.wait(self._pipes.carry(outgoing, incoming), self._look)

    def close(self) -> None:
        """Let go of all memory: the rank's own boxes, once all is taken out, and those it has looked into."""
        until = time.monotonic() + LAST
        while time.monotonic() < until and not all(box.is_free() for box in self._own):
            time.sleep(PAUSE)
        for box in (*self._own, *self._theirs.values()):
            os.close(box.descriptor)
        self._own, self._theirs = [], {}

    def memory(self) -> list[Tensor]:
        """What is held for messages."""
        return [box.memory for box in self._own]

    def _boxed(self, at: int, size: int) -> bool:
        return size >= LARGE and at != self.position

    def _put_in_box(self, messages: list[Tensor], takers: Sequence[int], *, same: bool) -> None:
        """Lay messages one after the other into a free box; notes take their places in the list."""
        self._number += 1
        start = _marks(self.num_members)
        lengths = [messages[at].numel() for at in takers]
        box = self._free(start + (lengths[0] if same else sum(lengths)))
        box.number, box.takers = self._number, tuple(takers)
        for k, at in enumerate(takers):
            if k == 0 or not same:
                box.memory[start : start + lengths[k]].copy_(messages[at])
            messages[at] = note_of(box, start)
            start += 0 if same else lengths[k]

    def _free(self, size: int) -> Box:
        while True:
            free = [box for box in self._own if box.is_free()]
            fitting = [box for box in free if box.size >= size]
            if fitting:
                return min(fitting, key=lambda box: box.size)
            if free or len(self._own) < FEW:
                return self._made(size, instead=free[0] if free and len(self._own) >= FEW else None)
            self._pipes.push()
            self._look()
            time.sleep(PAUSE)

    def _made(self, size: int, instead: Box | None) -> Box:
        if instead is not None:
            # those who look into it keep its memory until they see that it is gone
            os.ftruncate(instead.descriptor, 0)
            os.close(instead.descriptor)
            self._own.remove(instead)
        self._serial += 1
        box = new_box(size, self._serial)
        self._own.append(box)
        return box

    def opened(self, note: Tensor) -> tuple[Box, int, int]:
        """The box of a member that a note tells of, the message's number, and where in the box it begins."""
        pid, descriptor, serial, size, number, start = NOTE.unpack(bytes(note.tolist()))
        return self.box_of(pid, descriptor, serial, size), number, start

    def box_of(self, pid: int, descriptor: int, serial: int, size: int) -> Box:
        """The box of a member that has this serial number there."""
        box = self._theirs.get((pid, descriptor))
        if box is None or box.serial != serial:
            if box is not None:
                os.close(self._theirs.pop((pid, descriptor)).descriptor)
            try:
                box = self._theirs[pid, descriptor] = _look_into(pid, descriptor, serial, size)
            except OSError as error:
                raise PeerLost(f"process {pid} is gone with what it sent") from error
        return box


def new_box(size: int, serial: int) -> Box:
    """Shared memory of this process."""
    # some larger than asked for: the next message may be
    room = -(-size // ALIGNED) * ALIGNED
    descriptor = os.memfd_create("weft", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, room)
    return Box(descriptor, serial, mmap.mmap(descriptor, room))


def _look_into(pid: int, descriptor: int, serial: int, size: int) -> Box:
    """The box of another process of this host."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    return Box(opened, serial, mmap.mmap(opened, size))


def note_of(box: Box, start: int) -> Tensor:
    """Where another process finds a message."""
    return torch.tensor(list(words_of(box, start)), dtype=torch.uint8)


def words_of(box: Box, start: int) -> bytes:
    """The same as bytes."""
    return NOTE.pack(os.getpid(), box.descriptor, box.serial, box.size, box.number, start)


def _marks(num_members: int) -> int:
    """Bytes before the first message, so that messages begin where any dtype may."""
    return -(-num_members * TAKEN.size // ALIGNED) * ALIGNED

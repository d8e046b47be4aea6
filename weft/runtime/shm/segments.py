"""Segments: large messages between the processes of one host lie in shared memory, and only a note of where travels.

In: the bytes that go to each member of a group, and memory for what comes from each. Out: the bytes that came. A
message of at least `LARGE` bytes is copied into a segment of the sender; in its place a pipe (pipes.py) carries its
address, so both sides know from the size alone how a message travels. The taker copies it out and writes into the
segment that it has it; a segment whose takers have all done so is used again.

Promised: a segment is memory without a file and ends with its owner and those who look into it, however they end.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.runtime.links.transport import PeerLost
from weft.runtime.links.wire import LARGE
from weft.runtime.shm.pipes import Exchange, Pipes

ALIGNED = 4096
BEGIN = 64
"""Bytes: tensors in a segment begin where vector instructions like it."""
PIECE = 1 << 20
"""Bytes that travel at a time: a longer message takes no more memory on its way."""
ADDRESS = struct.Struct("<qqqqqq")
"""The segment: process, descriptor, serial number, size. The message in it: number, where it begins."""
TAKEN = struct.Struct("<q")
SERIALS = itertools.count(1)
"""Others tell the segments of a process apart by these: descriptors are used again."""
PAUSE = 5e-5
"""Seconds between two looks for a free segment."""
LAST = 5.0
"""Seconds that an ending rank waits for others to take what they were sent; those that are gone never will."""
FEW = 3
"""Segments that may wait for their takers before the sender waits too. A sum in two rounds (sums.py) begins three
exchanges before members surely have ended the first: with fewer segments they would wait for each other."""


@dataclass
class Segment:
    """Shared memory of one sender. Its first bytes are the takers' marks: the number of the last message they took.

    `number`: of the message that is in it; `takers`: positions in the group of those that it is for."""

    descriptor: int
    serial: int
    mapping: mmap.mmap
    number: int = 0
    takers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.memory = torch.frombuffer(self.mapping, dtype=torch.uint8)
        self.begin, self.size = self.memory.data_ptr(), self.memory.numel()

    @staticmethod
    def new(size: int) -> Segment:
        """Shared memory of this process."""
        # some larger than asked for: the next message may be
        length = -(-size // ALIGNED) * ALIGNED
        descriptor = os.memfd_create("weft", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, length)
        return Segment(descriptor, next(SERIALS), mmap.mmap(descriptor, length))

    def give_back(self) -> None:
        """Let go of the memory. Those who look into it keep it open until they see another in its place."""
        os.ftruncate(self.descriptor, 0)
        os.close(self.descriptor)

    def address(self, start: int) -> bytes:
        """Where another process finds what begins there."""
        return ADDRESS.pack(os.getpid(), self.descriptor, self.serial, self.size, self.number, start)

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
    """An exchange under way: the pipes' part of it, what that brings, and where what lies in segments is to be put."""

    exchange: Exchange
    brought: list[Tensor]
    sizes: Sequence[int]
    incoming: Sequence[Tensor] | None


class Segments:
    """The segments of one rank in one group.

    Args:
        position: of this rank among the members.
        look: called while waiting for others; raises if that is in vain.
        most: segments that may wait for their takers before the sender waits too.
    """

    def __init__(
        self, position: int, num_members: int, pipes: Pipes, look: Callable[[], None], *, most: float = FEW
    ) -> None:
        self.position, self.num_members = position, num_members
        self._pipes, self._look, self._most = pipes, look, most
        self._own: list[Segment] = []
        self._theirs: dict[tuple[int, int], Segment] = {}
        self._number = 0

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
        large = [at for at, message in enumerate(messages) if self._is_large(at, message.numel())]
        if large:
            self._put_in_segment(messages, large, same=same)
        brought = []
        for at, size in enumerate(sizes):
            own = at == self.position
            if incoming is None or own or self._is_large(at, size):
                length = 0 if own else ADDRESS.size if self._is_large(at, size) else size
                brought.append(torch.empty(length, dtype=torch.uint8))
            else:
                brought.append(incoming[at])
        return Passage(self._pipes.carry(messages, brought), brought, sizes, incoming)

    def finish(self, passage: Passage) -> None:
        """Wait for an exchange, and fetch what lies in segments."""
        found, release = self.look(passage)
        assert passage.incoming is not None
        for at, into in enumerate(passage.incoming):
            if self._is_large(at, passage.sizes[at]):
                into.copy_(found[at])
        release()

    def look(self, passage: Passage) -> tuple[list[Tensor], Callable[[], None]]:
        """Wait for an exchange: what came from each member, where it lies, and what to call after the last look."""
        self._pipes.wait(passage.exchange, self._look)
        found = list(passage.brought)
        taken: list[tuple[Segment, int]] = []
        for at, size in enumerate(passage.sizes):
            if self._is_large(at, size):
                segment, number, start = self.opened(bytes(found[at].tolist()))
                found[at] = segment.memory[start : start + size]
                taken.append((segment, number))

        def release() -> None:
            for segment, number in taken:
                segment.set_mark(self.position, number)

        return found, release

    def carry(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], *, same: bool) -> Callable[[], None]:
        """Begin an exchange in which long messages travel in pieces, one under way while another is taken out.

        Members need not agree on how many there are: each pair has as many as its message is long."""
        longest = max(tensor.numel() for tensor in (*outgoing, *incoming))

        def begun(start: int) -> Passage:
            some = [tensor[start : start + PIECE] for tensor in incoming]
            sent = [tensor[start : start + PIECE] for tensor in outgoing]
            return self.begin(sent, [tensor.numel() for tensor in some], some, same=same)

        first = begun(0)

        def end() -> None:
            last = first
            for start in range(PIECE, longest, PIECE):
                following = begun(start)
                self.finish(last)
                last = following
            self.finish(last)

        return end

    def tell(self, words: Tensor) -> list[Tensor]:
        """A few bytes to all members, and as many from each."""
        came = [torch.empty_like(words) for _ in range(self.num_members)]
        self.pass_small([words] * self.num_members, came)
        return came

    def pass_small(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """An exchange of contiguous tensors of less than `LARGE` bytes each, as they lie. `begin` sends them alike."""
        self._pipes.wait(self._pipes.carry(outgoing, incoming), self._look)

    def close(self) -> None:
        """Let go of all memory: the rank's own segments, once all is taken out, and those it has looked into."""
        until = time.monotonic() + LAST
        with suppress(PeerLost):
            while time.monotonic() < until and not (self._pipes.sent and all(one.is_free() for one in self._own)):
                self._pipes.push()
                time.sleep(PAUSE)
        for segment in (*self._own, *self._theirs.values()):
            os.close(segment.descriptor)
        self._own, self._theirs = [], {}

    def memory(self) -> list[Tensor]:
        """What is held for messages."""
        return [segment.memory for segment in self._own]

    def _is_large(self, at: int, size: int) -> bool:
        return size >= LARGE and at != self.position

    def _put_in_segment(self, messages: list[Tensor], takers: Sequence[int], *, same: bool) -> None:
        """Lay messages into a free segment; notes take their places in the list."""
        addresses = self.lay([messages[at] for at in (takers[:1] if same else takers)], takers)
        for at, address in zip(takers, addresses * len(takers) if same else addresses, strict=True):
            messages[at] = torch.frombuffer(bytearray(address), dtype=torch.uint8)

    def lay(self, parts: Sequence[Tensor], takers: Sequence[int]) -> list[bytes]:
        """Lay flat bytes one after the other into a free segment; the address of each."""
        self._number += 1
        # messages begin where any dtype may
        start = -(-self.num_members * TAKEN.size // ALIGNED) * ALIGNED
        segment = self._free(start + sum(part.numel() for part in parts))
        segment.number, segment.takers = self._number, tuple(takers)
        addresses = []
        for part in parts:
            segment.memory[start : start + part.numel()].copy_(part)
            addresses.append(segment.address(start))
            start += part.numel()
        return addresses

    def _free(self, size: int) -> Segment:
        while True:
            free = [segment for segment in self._own if segment.is_free()]
            fitting = [segment for segment in free if segment.size >= size]
            if fitting:
                return min(fitting, key=lambda segment: segment.size)
            if free or len(self._own) < self._most:
                if len(self._own) >= self._most:
                    free[0].give_back()
                    self._own.remove(free[0])
                self._own.append(Segment.new(size))
                return self._own[-1]
            self._pipes.push()
            self._look()
            time.sleep(PAUSE)

    def opened(self, address: bytes) -> tuple[Segment, int, int]:
        """The segment of a member that an address tells of, the message's number, and where in the segment that is."""
        pid, descriptor, serial, size, number, start = ADDRESS.unpack(address)
        segment = self._theirs.get((pid, descriptor))
        if segment is None or segment.serial != serial:
            if segment is not None:
                os.close(self._theirs.pop((pid, descriptor)).descriptor)
            try:
                opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
                segment = self._theirs[pid, descriptor] = Segment(opened, serial, mmap.mmap(opened, size))
            except OSError as error:
                raise PeerLost(f"process {pid} is gone with what it sent") from error
        return segment, number, start

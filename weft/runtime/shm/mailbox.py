"""Shm mailbox: tensors that one process of a host leaves for another under a tag, and neither waits for the other.

In: tensors, a rank and a tag. Out: at that rank, when it asks for the tag, the tensors. A small message travels through
a pipe (pipes.py) as it is; a large one lies in shared memory (segments.py) and its address travels, so a pipe hardly
fills and sending does not wait. Messages that come before they are asked for are kept.

Promised: no tag is used twice while a message of it is under way; a member that is gone ends the wait for it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from weft.runtime.links.inbox import Inbox
from weft.runtime.links.transport import Expected
from weft.runtime.links.watch import PeerLost
from weft.runtime.links.wire import as_bytes, num_bytes, unpack
from weft.runtime.shm.pipes import Pipes
from weft.runtime.shm.segments import LAST, PAUSE, Segment, Segments, new_segment, note_of

SMALL = 4 << 10
"""Bytes up to which a message travels through the pipe."""
HEAD = struct.Struct("<III")
"""Bytes of the tag, bytes of the body, and whether the body is a note."""


class ShmMailbox:
    """The messages of one rank in one group. For one thread at a time.

    Args:
        segments: its view of the others' shared memory.
        look: called while waiting; raises if that is in vain.
    """

    def __init__(self, pipes: Pipes, segments: Segments, look: Callable[[], None]) -> None:
        self._pipes, self._segments, self._look = pipes, segments, look
        self._own: list[Segment] = []
        self._serial = 0
        self._read = [bytearray() for _ in range(segments.num_members)]
        self._came = Inbox[tuple[bytes, bool]]()
        self._own_posts = Inbox[list[Tensor]]()

    @torch.no_grad()
    def post(self, at: int, tag: str, tensors: Sequence[Tensor]) -> None:
        """Leave tensors for the member at a position."""
        if at == self._segments.position:
            kept = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
            self._own_posts.put(at, tag, kept)
            return
        parts = [as_bytes(tensor) for tensor in tensors]
        size = sum(part.numel() for part in parts)
        body = self._laid(at, parts, size) if size > SMALL else b"".join(map(_bytes_of, parts))
        words = tag.encode()
        self._pipes.write(at, HEAD.pack(len(words), len(body), size > SMALL) + words + body)

    def take(self, at: int, tag: str, wants: Sequence[Expected]) -> list[Tensor]:
        """What the member at a position left under a tag."""
        if at == self._segments.position:
            assert self._own_posts.has(at, tag), f"a rank takes {tag} from itself before it posts it"
            return self._own_posts.pop(at, tag)
        while not self._came.has(at, tag):
            self._read[at] += self._pipes.read(at, self._look)
            self._sort(at)
        body, is_note = self._came.pop(at, tag)
        flat = self._fetched(body, num_bytes(wants)) if is_note else _tensor_of(body)
        assert flat.numel() == num_bytes(wants), f"{tag} has {flat.numel()} bytes, {num_bytes(wants)} were expected"
        return unpack(flat, [wants])[0]

    def num_came(self, at: int) -> int:
        """How many messages have come from a member so far."""
        return self._came.counts[at]

    def push(self) -> None:
        """Send on what did not fit into the pipes."""
        self._pipes.push()

    def close(self) -> None:
        """There will be no further message; wait a while for others to take what lies here."""
        until = time.monotonic() + LAST
        with suppress(PeerLost):
            while time.monotonic() < until and not (
                self._pipes.sent and all(segment.is_free() for segment in self._own)
            ):
                self.push()
                time.sleep(PAUSE)
        for segment in self._own:
            os.close(segment.descriptor)
        self._own = []
        self._segments.close()

    def memory(self) -> list[Tensor]:
        """What is held for messages."""
        return [segment.memory for segment in self._own]

    def _sort(self, at: int) -> None:
        """File what has come in full."""
        read = self._read[at]
        while len(read) >= HEAD.size:
            length, size, is_note = HEAD.unpack_from(read)
            end = HEAD.size + length + size
            if len(read) < end:
                return
            tag = bytes(read[HEAD.size : HEAD.size + length]).decode()
            body = bytes(read[HEAD.size + length : end])
            self._came.put(at, tag, (body, bool(is_note)))
            del read[:end]

    def _laid(self, at: int, parts: Sequence[Tensor], size: int) -> bytes:
        """Lay a message into a segment; the note of where it is."""
        start = self._segments.marks
        fitting = [segment for segment in self._own if segment.is_free() and segment.size >= start + size]
        segment = min(fitting, key=lambda one: one.size) if fitting else self._made(start + size)
        segment.number, segment.takers = segment.number + 1, (at,)
        torch.cat(list(parts), out=segment.memory[start : start + size])
        return bytes(note_of(segment, start).tolist())

    def _made(self, size: int) -> Segment:
        self._serial += 1
        # apart from the serial numbers of messages and of sums
        segment = new_segment(size, self._serial + (1 << 40))
        self._own.append(segment)
        return segment

    def _fetched(self, note: bytes, size: int) -> Tensor:
        segment, number, start = self._segments.opened(_tensor_of(note))
        found = segment.memory[start : start + size].clone()
        segment.set_mark(self._segments.position, number)
        return found


def _bytes_of(flat: Tensor) -> bytes:
    """The content of a flat byte tensor."""
    return ctypes.string_at(flat.data_ptr(), flat.numel())


def _tensor_of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

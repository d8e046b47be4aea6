"""Shm mailbox: tensors that one process of a host leaves for another under a tag, and neither waits for the other.

In: tensors, a rank and a tag. Out: at that rank, when it asks for the tag, the tensors. A small message travels through
a pipe (pipes.py) as it is; a large one lies in shared memory (segments.py) and its address travels, so a pipe hardly
fills and sending does not wait. Messages that come before they are asked for are kept.

Promised: no tag is used twice while a message of it is under way; a member that is gone ends the wait for it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.runtime.links.inbox import Inbox
from weft.runtime.links.transport import Expected
from weft.runtime.links.wire import as_bytes, num_bytes, unpack
from weft.runtime.shm.pipes import Pipes
from weft.runtime.shm.segments import Segments

SMALL = 4 << 10
"""Bytes up to which a message travels through the pipe."""
HEAD = struct.Struct("<III")
"""Bytes of the tag, bytes of the body, and whether the body is a note."""


class ShmMailbox:
    """The messages of one rank in one group. For one thread at a time.

    Args:
        segments: for what is large; as many as it takes, so that nobody waits to send.
        look: called while waiting; raises if that is in vain.
    """

    def __init__(self, pipes: Pipes, segments: Segments, look: Callable[[], None]) -> None:
        self._pipes, self._segments, self._look = pipes, segments, look
        self._read = [bytearray() for _ in range(segments.num_members)]
        self._came = Inbox[tuple[bytes, bool]]()

    @torch.no_grad()
    def post(self, at: int, tag: str, tensors: Sequence[Tensor]) -> None:
        """Leave tensors for the member at a position."""
        parts = [as_bytes(tensor) for tensor in tensors]
        size = sum(part.numel() for part in parts)
        body = self._segments.lay(parts, (at,))[0] if size > SMALL else b"".join(map(_bytes_of, parts))
        words = tag.encode()
        self._pipes.write(at, HEAD.pack(len(words), len(body), size > SMALL) + words + body)

    def take(self, at: int, tag: str, wants: Sequence[Expected]) -> list[Tensor]:
        """What the member at a position left under a tag."""
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
        self._segments.close()

    def memory(self) -> list[Tensor]:
        """What is held for messages."""
        return self._segments.memory()

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

    def _fetched(self, address: bytes, size: int) -> Tensor:
        segment, number, start = self._segments.opened(address)
        found = segment.memory[start : start + size].clone()
        segment.set_mark(self._segments.position, number)
        return found


def _bytes_of(flat: Tensor) -> bytes:
    """The content of a flat byte tensor."""
    return ctypes.string_at(flat.data_ptr(), flat.numel())


def _tensor_of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

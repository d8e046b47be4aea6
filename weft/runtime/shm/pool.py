"""Shared pool: memory that the members of a group see, handed out to the tensors of one rank.

In: how many bytes. Out: memory in a segment of this rank (`segments.py`), and the address by which the others find a
tensor that lies in one. Promised: memory is handed out again only when nothing looks at it any more, neither another
rank nor a tensor of this one (a sum is usually somebody's gradient); what has long not been asked for is given back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.runtime.links.buffer_pool import is_private
from weft.runtime.links.wire import LARGE
from weft.runtime.shm.segments import ADDRESS, Segment, Segments, address_of, new_segment

BRIEF = 8 << 20
"""Bytes from which on any segment that is large enough serves for a short time."""
SPARE = 1.25
"""A segment may be larger than what is asked for by this factor."""
IDLE = 256
"""A segment that was not handed out in so many turns is given back."""


class SharedPool:
    """The shared memory of one rank in one group.

    Memory is handed out in one thread, collectives run in another: each has its own segments to look after.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._own: list[Segment] = []
        self._turn, self._serial = 0, 0
        self._last: dict[int, int] = {}
        """By serial number, the turn in which a segment was last handed out."""

    @property
    def position(self) -> int:
        """Of this rank among the members."""
        return self._segments.position

    def lend(self, num_bytes: int, *, brief: bool = False) -> Tensor:
        """Memory of that size, at least `LARGE`. `brief`: it is soon free again, so it may be part of a larger one."""
        self._turn += 1
        free = [segment for segment in self._own if is_private(segment.memory)]
        fitting = [one for one in free if num_bytes <= one.size <= max(SPARE * num_bytes, LARGE)]
        if brief and not fitting:
            # a small one would keep the largest from the next that needs it
            fitting = [
                one for one in free if num_bytes <= one.size and (num_bytes >= BRIEF or one.size <= 2 * num_bytes)
            ]
        segment = min(fitting, key=lambda one: one.size) if fitting else self._made(num_bytes)
        self._last[segment.serial] = self._turn
        for idle in free:
            if self._turn - self._last[idle.serial] > IDLE:
                self._give_back(idle)
        return segment.memory[:num_bytes]

    def address(self, tensor: Tensor) -> bytes | None:
        """Where other members find a tensor; None if it does not lie here from its first byte to its last."""
        if not tensor.is_contiguous():
            return None
        begin, num_bytes = tensor.data_ptr(), tensor.nbytes
        for segment in self._own:
            if segment.begin <= begin and begin + num_bytes <= segment.begin + segment.size:
                return address_of(segment, begin - segment.begin)
        return None

    def find(self, addresses: Sequence[bytes]) -> list[list[tuple[Segment, int]]]:
        """By position, where the tensors of each member lie; all members have as many, which do not change until they
        meet."""
        told = self._segments.tell(torch.frombuffer(bytearray(b"".join(addresses)), dtype=torch.uint8))
        found: list[list[tuple[Segment, int]]] = []
        for at, words in enumerate(told):
            each = () if at == self.position else ADDRESS.iter_unpack(bytes(words.tolist()))
            found.append(
                [
                    (self._segments.segment_of(pid, file, serial, size), start)
                    for pid, file, serial, size, _, start in each
                ]
            )
        return found

    def meet(self) -> None:
        """Wait for all members."""
        self._segments.tell(torch.zeros(1, dtype=torch.uint8))

    def close(self) -> None:
        """Let go of all memory that no tensor lies in."""
        for segment in self._own:
            os.close(segment.descriptor)
        self._own = []

    def memory(self) -> list[Tensor]:
        """What was handed out, or may be."""
        return [segment.memory for segment in self._own]

    def _made(self, num_bytes: int) -> Segment:
        # serial numbers of one process are not used twice: others tell its segments apart by them
        self._serial += 1
        segment = new_segment(num_bytes, -self._serial)
        self._own.append(segment)
        return segment

    def _give_back(self, segment: Segment) -> None:
        # those who looked into it keep it open until they see another in its place
        os.ftruncate(segment.descriptor, 0)
        os.close(segment.descriptor)
        self._own.remove(segment)
        del self._last[segment.serial]

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
from weft.runtime.shm.segments import ADDRESS, Segment, Segments

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
        self._turn = 0
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
        if not fitting:
            fitting = [Segment.new(num_bytes)]
            self._own += fitting
        segment = min(fitting, key=lambda one: one.size)
        self._last[segment.serial] = self._turn
        for idle in free:
            if self._turn - self._last[idle.serial] > IDLE:
                idle.give_back()
                self._own.remove(idle)
                del self._last[idle.serial]
        return segment.memory[:num_bytes]

    def address(self, tensor: Tensor) -> bytes | None:
        """Where other members find a tensor; None if it does not lie here from its first byte to its last."""
        if not tensor.is_contiguous():
            return None
        begin, num_bytes = tensor.data_ptr(), tensor.nbytes
        for segment in self._own:
            if segment.begin <= begin and begin + num_bytes <= segment.begin + segment.size:
                return segment.address(begin - segment.begin)
        return None

    def find(self, addresses: Sequence[bytes]) -> list[list[tuple[Segment, int]]]:
        """By position, where the tensors of each member lie; all members have as many, which do not change until they
        meet."""
        told = self._segments.tell(torch.frombuffer(bytearray(b"".join(addresses)), dtype=torch.uint8))
        found: list[list[tuple[Segment, int]]] = []
        for at, words in enumerate(told):
            text, each = bytes(words.tolist()), []
            for start in range(0, 0 if at == self.position else len(text), ADDRESS.size):
                segment, _, begin = self._segments.opened(text[start : start + ADDRESS.size])
                each.append((segment, begin))
            found.append(each)
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

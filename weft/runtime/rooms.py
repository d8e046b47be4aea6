"""Rooms: memory that the processes of one host read in each other, handed out tensor by tensor.

In: a transport that lends memory to a group. Out: tensors in it, and where others find them. Tensors share rooms of one
size; a larger one has its own. A room is lent again when no tensor lies in it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from weft.runtime.boxes import LARGE
from weft.runtime.script import Index
from weft.runtime.shared_parts import Lent
from weft.runtime.shared_sums import SharedSums
from weft.runtime.transport import Transport
from weft.runtime.within import Within

ALIGNED = 64
"""Bytes: tensors begin where vector instructions like it."""

WORTH = 1 << 20
"""Bytes from which on tensors of a group travel together: less goes one by one, in memory that fits to the byte."""

Group = tuple[int, ...]
Work = Callable[[SharedSums, Sequence[int]], None]
"""What a member does, given the shared memory and the positions of the members in group order."""

T_co = TypeVar("T_co", covariant=True)


class Waits(Protocol[T_co]):
    """Something under way."""

    def wait(self) -> T_co: ...


@runtime_checkable
class Shares(Protocol):
    """A transport whose ranks may see each other's memory."""

    def lends(self, group: Group) -> bool:
        """True if these ranks do. All of them ask."""
        ...

    def room(self, numel: int, dtype: torch.dtype, group: Group, *, brief: bool = False) -> Tensor: ...

    def note(self, tensor: Tensor, group: Group) -> bytes | None:
        """Where the others find a tensor; None if they cannot see it."""
        ...

    def start_shared(self, kind: str, alike: Tensor, group: Group, work: Work) -> Waits[None]:
        """Begin what all members do, in the second lane."""
        ...


class Rooms:
    """Memory lent to one group.

    Args:
        size: bytes of a room that tensors share.
        brief: tensors are soon gone again.
    """

    def __init__(self, job: Shares, group: Group, size: int, *, brief: bool) -> None:
        self._brief = brief
        # less is not lent
        self._job, self._group, self._size = job, group, max(size, LARGE)
        self._current: Tensor | None = None
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with any content."""
        num_bytes, room = prod(shape) * dtype.itemsize, self.room_of(shape, dtype)
        if room >= self._size:
            # the one that is not yet full stays open for the next
            return self._lend(room)[:num_bytes].view(dtype).view(shape)
        if self._current is None or self._used + room > self._current.numel():
            # first let go of the last one: it may be the one that is lent
            self._current = None
            self._current, self._used = self._lend(self._size), 0
        start, self._used = self._used, self._used + room
        return self._current[start : start + num_bytes].view(dtype).view(shape)

    def _lend(self, num_bytes: int) -> Tensor:
        brief = self._brief and num_bytes > self._size
        return self._job.room(num_bytes, torch.uint8, self._group, brief=brief)

    @staticmethod
    def room_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes that a tensor takes here."""
        return -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED

    def holds(self, tensor: Tensor) -> bool:
        """True if a tensor lies where the others see it."""
        return tensor.is_contiguous() and self._job.note(tensor, self._group) is not None

    def note(self, tensor: Tensor) -> bytes:
        """Where the others find a tensor that lies where they see it."""
        note = self._job.note(tensor, self._group)
        assert note is not None, "a room lies in memory that others see"
        return note

    def leave(self) -> None:
        """Nothing more goes where the last tensor lies."""
        self._current = None

    @torch.no_grad()
    def lent(self, tensor: Tensor, parts: tuple[Index | None, ...]) -> Lent:
        """A tensor where others see it: as it lies, or a copy."""
        note = self._job.note(tensor, self._group) if tensor.is_contiguous() else None
        if note is None:
            tensor = self.take(tuple(tensor.shape), tensor.dtype).copy_(tensor)
            note = self.note(tensor)
        return Lent(tensor, note, parts)

    def start(self, kind: str, alike: Tensor, work: Work) -> Waits[None]:
        """Begin what all members do with what lies here."""
        return self._job.start_shared(kind, alike, self._group, work)


def of_job(transport: Transport, group: Group) -> tuple[Transport, Group]:
    """The transport of all ranks, and the ranks of a group as they are counted there."""
    while isinstance(transport, Within):
        # in this order: the group is counted as the inner one does
        group = transport.outside(group)
        transport = transport.whole
    return transport, group


def rooms_for(transport: Transport, group: Group, size: int, *, brief: bool) -> Rooms | None:
    """Rooms of a group; None if its ranks do not see each other's memory."""
    job, outside = of_job(transport, group)
    return Rooms(job, outside, size, brief=brief) if isinstance(job, Shares) and job.lends(outside) else None

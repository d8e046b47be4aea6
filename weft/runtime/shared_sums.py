"""Shared sums: tensors of the processes of one host, added up where they lie.

In: a flat tensor in memory lent by this rank, on every member of a group. Out: nothing: each member's tensor holds the
total. Each member adds up its own chunk of all tensors, in group order, and writes the sum into all of them, so nothing
is sent and no byte is held twice; before that and after it all members tell each other that they are there. The bits
are those of `sums.py`.

Promised: memory is lent again only when nothing looks at it any more, neither another rank nor a tensor of this one
(the total is usually somebody's gradient); what has long not been asked for is given back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.runtime.boxes import LARGE, NOTE, Box, Boxes, new_box, note_of, words_of
from weft.runtime.sums import combine

BLOCK = 1 << 20
"""Bytes that are added up at a time: what was just written is still in the cache when it is copied to the others."""
BRIEF = 8 << 20
"""Bytes from which on any box that is large enough serves for a short time."""
LET_GO = 8 << 20
"""Bytes from which on memory of others that was looked at is let go: to look again costs a little time."""
SPARE = 1.25
"""A box may be larger than what is asked for by this factor."""
IDLE = 256
"""A box that was not lent in so many turns is given back."""


class SharedSums:
    """The lent memory of one rank in one group, and the sums in it.

    Memory is lent in one thread, sums run in another: each has its own boxes to look after.
    """

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes
        self._own: list[Box] = []
        self._turn, self._serial = 0, 0
        self._last: dict[int, int] = {}
        """By serial number, the turn in which a box was last lent."""

    def lend(self, num_bytes: int, *, brief: bool = False) -> Tensor | None:
        """Memory of that size in which a tensor can be summed; None where a sum is better sent.

        `brief`: it is soon free again, so it may be part of any larger one."""
        if num_bytes < LARGE:
            return None
        self._turn += 1
        free = [box for box in self._own if is_private(box.memory)]
        fitting = [box for box in free if num_bytes <= box.size <= max(SPARE * num_bytes, LARGE)]
        if brief and not fitting:
            # a small one would keep the largest from the next that needs it
            fitting = [
                box for box in free if num_bytes <= box.size and (num_bytes >= BRIEF or box.size <= 2 * num_bytes)
            ]
        box = min(fitting, key=lambda box: box.size) if fitting else self._made(num_bytes)
        self._last[box.serial] = self._turn
        for idle in free:
            if self._turn - self._last[idle.serial] > IDLE:
                self._give_back(idle)
        return box.memory[:num_bytes]

    def owns(self, flat: Tensor) -> bool:
        """True if a tensor lies in lent memory, from its start on."""
        return any(box.memory.data_ptr() == flat.data_ptr() for box in self._own)

    def add_up(self, flat: Tensor, order: Sequence[int], op: str) -> None:
        """Make a lent tensor the total of all members'.

        Args:
            order: positions of the members, in the order in which they are added.
        """
        box = next(box for box in self._own if box.memory.data_ptr() == flat.data_ptr())
        boxes = self._everybodys(box)
        tensors = [one.memory[: flat.nbytes].view(flat.dtype) for one in boxes]
        own = [tensor.tensor_split(len(tensors))[self._boxes.position] for tensor in tensors]
        blocks = [chunk.split(BLOCK // flat.itemsize) for chunk in own]
        for parts in zip(*blocks, strict=True):
            mine = parts[self._boxes.position]
            total = combine([parts[at] for at in order], op, mine if len(parts) == 2 else None)
            for part in parts:
                if part is not total:
                    part.copy_(total)
        for one in boxes:
            if one is not box and one.size >= LET_GO:
                one.look_away()
        # nobody reads or writes in a tensor that another takes for complete
        self.meet()

    @property
    def position(self) -> int:
        """Of this rank among the members."""
        return self._boxes.position

    def note(self, tensor: Tensor) -> bytes | None:
        """Where other members find a tensor; None if it does not lie in lent memory."""
        for box in self._own:
            start = tensor.data_ptr() - box.memory.data_ptr()
            if start >= 0 and start + tensor.nbytes <= box.size:
                return words_of(box, start)
        return None

    def find(self, notes: Sequence[bytes]) -> list[list[tuple[Box, int]]]:
        """By position, where the tensors of each member lie; all members have as many, which do not change until they
        meet."""
        told = self._boxes.tell(torch.frombuffer(bytearray(b"".join(notes)), dtype=torch.uint8))
        found: list[list[tuple[Box, int]]] = []
        for at, words in enumerate(told):
            each = () if at == self.position else NOTE.iter_unpack(bytes(words.tolist()))
            found.append(
                [(self._boxes.box_of(pid, file, serial, size), start) for pid, file, serial, size, _, start in each]
            )
        return found

    def meet(self) -> None:
        """Wait for all members."""
        self._boxes.tell(torch.zeros(1, dtype=torch.uint8))

    def close(self) -> None:
        """Let go of all memory that no tensor lies in."""
        for box in list(self._own):
            os.close(box.descriptor)
        self._own = []

    def memory(self) -> list[Tensor]:
        """What was lent, or may be."""
        return [box.memory for box in self._own]

    def _everybodys(self, box: Box) -> list[Box]:
        """The boxes in which the members' tensors lie, by position."""
        told = enumerate(self._boxes.tell(note_of(box, 0)))
        return [box if at == self._boxes.position else self._boxes.opened(note)[0] for at, note in told]

    def _made(self, num_bytes: int) -> Box:
        # serial numbers of one process are not used twice: others tell its boxes apart by them
        self._serial += 1
        box = new_box(num_bytes, -self._serial)
        self._own.append(box)
        return box

    def _give_back(self, box: Box) -> None:
        # those who looked into it keep it open until they see another in its place
        os.ftruncate(box.descriptor, 0)
        os.close(box.descriptor)
        self._own.remove(box)
        del self._last[box.serial]


def is_private(tensor: Tensor) -> bool:
    """True if nothing else lies in the tensor's memory: it may be written to.

    Autograd may give two leaves gradients on one memory, and may not be done with either."""
    # one reference is the tensor's, one that of the storage asked for here
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2

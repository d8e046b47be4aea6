"""Shared parts: what the processes of one host need of each other's tensors, read where it lies.

In: tensors in memory that every member of a group has lent (`shared_sums.py`), as many on each and in one order, and
which part of each belongs to which member. Out: `pull` fills the others' parts in; `fetch` puts wholes together from
parts; `add_parts` gives this member's part of each sum, added in group order. Members tell each other where their
tensors lie, so each may lay them as it likes, and once more when they have read, so that nobody writes where another
still reads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.runtime.boxes import Box
from weft.runtime.script import Index
from weft.runtime.shared_sums import BLOCK, LET_GO, SharedSums
from weft.runtime.sums import combine
from weft.runtime.transfers import put, size, take


@dataclass(frozen=True)
class Lent:
    """A contiguous tensor in lent memory.

    Args:
        note: where others find it.
        parts: what each member has of it, in group order; None: nothing.
    """

    tensor: Tensor
    note: bytes
    parts: tuple[Index | None, ...]


@torch.no_grad()
def pull(shared: SharedSums, order: Sequence[int], lent: Sequence[Lent]) -> None:
    """Fill in the parts of the others, which are up to date where they belong.

    Args:
        order: positions of the members, in group order.
    """
    theirs = shared.find([one.note for one in lent])
    for member, position in enumerate(order):
        if position == shared.position:
            continue
        for one, (box, start) in zip(lent, theirs[position], strict=True):
            index = one.parts[member]
            if index is not None:
                _fetch(one.tensor, index, box, start)
    shared.meet()


@torch.no_grad()
def fetch(
    shared: SharedSums,
    order: Sequence[int],
    notes: Sequence[bytes],
    parts: Sequence[tuple[Index, ...]],
    own: Sequence[Tensor],
    into: Sequence[Tensor],
) -> None:
    """Put wholes together from parts that lie with their members.

    Args:
        notes: where others find this member's parts.
        parts: which part of each whole is whose, in group order.
        own: this member's parts.
        into: the wholes.
    """
    theirs = shared.find(notes)
    for member, position in enumerate(order):
        for at, (whole, indices) in enumerate(zip(into, parts, strict=True)):
            if position == shared.position:
                put(whole, indices[member], own[at])
            else:
                box, start = theirs[position][at]
                _fetch_part(whole, indices[member], box, start)
    shared.meet()


@torch.no_grad()
def add_parts(shared: SharedSums, order: Sequence[int], lent: Sequence[Lent], into: Sequence[Tensor]) -> None:
    """Write this member's part of each sum."""
    theirs = shared.find([one.note for one in lent])
    mine = order.index(shared.position)
    for at, (one, total) in enumerate(zip(lent, into, strict=True)):
        index = one.parts[mine]
        if index is None:
            continue
        tensors = [
            one.tensor if position == shared.position else _looked_at(one.tensor, *theirs[position][at])
            for position in order
        ]
        _add([take(tensor, index) for tensor in tensors], total)
    for box in {id(box): box for each in theirs for box, _ in each if box.size >= LET_GO}.values():
        box.look_away()
    shared.meet()


def narrowed(tensor: Tensor, index: Index) -> Tensor | None:
    """A view of the part at `index`; None if it is in several pieces."""
    for dim, intervals in enumerate(index):
        if len(intervals) != 1:
            return None
        ((start, stop),) = intervals
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _fetch(tensor: Tensor, index: Index, box: Box, start: int) -> None:
    """Copy a part from where it lies in another process to the same place of a tensor here."""
    view = narrowed(tensor, index)
    if view is None or not view.is_contiguous():
        put(tensor, index, take(_looked_at(tensor, box, start), index))
        return
    # read, not mapped: mapped memory would count as this process's too
    _read(box.descriptor, view, start + view.data_ptr() - tensor.data_ptr())


def _fetch_part(whole: Tensor, index: Index, box: Box, start: int) -> None:
    """Copy a part that lies alone in another process to its place in a whole."""
    view = narrowed(whole, index)
    if view is not None and view.is_contiguous():
        _read(box.descriptor, view, start)
        return
    part = torch.empty(size(index), dtype=whole.dtype, device=whole.device)
    _read(box.descriptor, part, start)
    put(whole, index, part)


def _read(descriptor: int, into: Tensor, start: int) -> None:
    memory = memoryview((ctypes.c_char * into.nbytes).from_address(into.data_ptr())).cast("B")
    while memory:
        done = os.preadv(descriptor, [memory], start)
        assert done > 0, "memory that another process lent is shorter than it said"
        memory, start = memory[done:], start + done


def _looked_at(like: Tensor, box: Box, start: int) -> Tensor:
    """The tensor of another process that lies in its box, in the shape of the one here."""
    return box.memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _add(tensors: Sequence[Tensor], total: Tensor) -> None:
    """Add up in order, in blocks: what was just written is still in the cache when the next is added."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        combine(tensors, "sum", total)
        return
    blocks = [tensor.view(-1).split(BLOCK // total.itemsize) for tensor in (total, *tensors)]
    for out, *parts in zip(*blocks, strict=True):
        combine(parts, "sum", out)

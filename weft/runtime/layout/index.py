"""Indices: the part of a tensor that a rank holds, taken, put in place, measured.

In: a tensor and an Index, for each dim the intervals taken, in order. Out: that part, laid end to end.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from weft.runtime.layout.indices import extent
from weft.runtime.layout.transfer import Index

Shape = tuple[int, ...]


def take(tensor: Tensor, index: Index) -> Tensor:
    """The part at `index`: for each dim the intervals in order, laid end to end. Differentiable.

    The tensor itself if the index takes everything.

    >>> take(torch.arange(6), (((4, 6), (0, 1)),))
    tensor([4, 5, 0])
    """
    assert len(index) == tensor.dim(), f"index of {len(index)} dims for a tensor of shape {tuple(tensor.shape)}"
    for dim, intervals in enumerate(index):
        if intervals == ((0, tensor.shape[dim]),):
            continue
        pieces = [tensor.narrow(dim, start, stop - start) for start, stop in intervals]
        tensor = torch.cat(pieces, dim) if len(pieces) > 1 else (pieces[0] if pieces else tensor.narrow(dim, 0, 0))
    return tensor


def put(target: Tensor, index: Index, piece: Tensor, *, add: bool = False) -> None:
    """Write the piece (or add it) at `index` of the target, in place: the reverse of `take`."""
    assert tuple(piece.shape) == size(index), f"piece of shape {tuple(piece.shape)} for an index of shape {size(index)}"
    for box in itertools.product(*(_runs(intervals) for intervals in index)):
        into, part = target, piece
        for dim, (start, at, length) in enumerate(box):
            into, part = into.narrow(dim, start, length), part.narrow(dim, at, length)
        if add:
            into.add_(part)
        else:
            into.copy_(part)


def _runs(intervals: tuple[tuple[int, int], ...]) -> list[tuple[int, int, int]]:
    """For each interval: where it lies in the target, where in the piece, and its length."""
    runs, at = [], 0
    for start, stop in intervals:
        runs.append((start, at, stop - start))
        at += stop - start
    return runs


def size(index: Index) -> Shape:
    """Shape of what the index takes."""
    return tuple(map(extent, index))


def nothing(shape: Shape) -> Index:
    """The index that takes nothing of a tensor, along its first dim. Of a number, which has none, it has one dim.

    >>> size(nothing((4, 8))), size(nothing(()))
    ((0, 8), (0,))
    """
    return ((), *(((0, length),) if length else () for length in shape[1:]))


def covers(index: Index, shape: Shape) -> bool:
    """True if the index is all of a tensor of that shape, in order."""
    return all(intervals == (((0, length),) if length else ()) for intervals, length in zip(index, shape, strict=True))


def narrowed(tensor: Tensor, index: Index) -> Tensor | None:
    """A view of the part at `index`; None if it is in several pieces."""
    for dim, intervals in enumerate(index):
        if len(intervals) != 1:
            return None
        ((start, stop),) = intervals
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor

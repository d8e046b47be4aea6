"""Global indices of a part: which elements of the whole tensor a local one holds.

In: for each dim the intervals that the part holds, stored concatenated in that order. Out: index tensors on the
part's device. Any partition of a tensor yields every global index exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Intervals = tuple[tuple[int, int], ...]
"""Intervals of one dim, stored concatenated."""


def extent(intervals: Intervals) -> int:
    """Number of indices."""
    return sum(stop - start for start, stop in intervals)


def indices(intervals: Intervals, device: torch.device | str | None = None) -> Tensor:
    """The global indices of one dim, in stored order."""
    pieces = [torch.arange(start, stop, device=device) for start, stop in intervals]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)


def linear_index(shape: Sequence[int], at: Sequence[Intervals], device: torch.device | str | None = None) -> Tensor:
    """The row-major index in the whole tensor of every element of a part, in the part's shape.

    >>> linear_index((2, 6), (((1, 2),), ((0, 1), (4, 6))))
    tensor([[ 6, 10, 11]])
    """
    found = torch.zeros((), dtype=torch.int64, device=device)
    for size, intervals in zip(shape, at, strict=True):
        found = (found * size).unsqueeze(-1) + indices(intervals, device)
    return found


def locate(ids: Tensor, intervals: Intervals) -> tuple[Tensor, Tensor]:
    """Where global indices lie in a part: their positions (0 for those elsewhere), and which of them are here.

    >>> locate(torch.tensor([5, 0, 9]), ((4, 6), (8, 12)))
    (tensor([1, 0, 3]), tensor([ True, False,  True]))
    """
    positions = torch.zeros_like(ids)
    here = torch.zeros_like(ids, dtype=torch.bool)
    offset = 0
    for start, stop in intervals:
        inside = (ids >= start) & (ids < stop)
        positions = torch.where(inside, ids - (start - offset), positions)
        here = here | inside
        offset += stop - start
    return positions, here

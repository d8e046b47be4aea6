"""Positions that count over a whole tensor: triangles and masked scatters of parts.

In: local parts and the global indices they hold. Out: local parts of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.runtime.comm import Comms
from weft.runtime.indices import Intervals, indices, linear_index


def triangle(x: Tensor, diagonal: int, *, rows: Intervals, columns: Intervals, upper: bool) -> Tensor:
    """tril or triu of a part that holds several ranges of rows or columns."""
    right = indices(columns, x.device) - indices(rows, x.device).unsqueeze(-1)
    kept = right >= diagonal if upper else right <= diagonal
    return torch.where(kept, x, 0)


def masked_scatter(
    x: Tensor, mask: Tensor, source: Tensor, *, shape: Sequence[int], at: Sequence[Intervals], comms: Comms
) -> Tensor:
    """The masked elements held here take those of the source whose number, counted over all cells, is theirs."""
    x, mask = torch.broadcast_tensors(x, mask)
    index = linear_index(shape, at, x.device)
    own = index[mask]
    everywhere = own
    for comm in comms:
        everywhere = torch.cat(comm.all_gather(everywhere))
    number = torch.searchsorted(everywhere.sort()[0], own)
    return x.masked_scatter(mask, source.flatten()[number])

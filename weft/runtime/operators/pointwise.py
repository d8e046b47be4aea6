"""What is done element by element, where a part must know more than itself: triangles, masked scatters, expectations.

In: local parts and the global indices they hold. Out: local parts of the result. `expect` gives a value on, and raises
in a step in which a branch of the model's forward goes another way than when the model was captured: the program holds
one branch only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.runtime.comm import Comms
from weft.runtime.layout.indices import Intervals, indices, linear_index


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


def expect(value: Tensor, predicates: Sequence[Tensor], *, expected: Sequence[bool], places: Sequence[str]) -> Tensor:
    """The value, if every predicate is what is expected of it."""
    for predicate, wanted, place in zip(predicates, expected, places, strict=True):
        torch._assert_async(
            (predicate.detach().bool() == wanted).reshape(()),
            f"{place}: the program was made for a forward in which this is {wanted}; it is {not wanted} in this step",
        )
    return value.clone()

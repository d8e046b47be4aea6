"""Lookups in a table whose rows may be cut: embeddings and embedding bags.

`embedding_part` looks up the rows that a cell holds, zeros elsewhere: the cells' results add up to the lookup. An id
outside the whole table raises, as it does uncut.

Bags are given by a table, ids, and either offsets (where each bag begins in a row of ids) or ids with a dim of bags.
Out: one row a bag: `sum`, `mean` or `max` of its rows, those of `padding_idx` left out; zeros for an empty bag.
`embedding_bag` is torch's operator with one result; `embedding_bag_part` does the work of one cell:

    rows of the table cut     sums and means come out as addends; a maximum is agreed upon by all cells, and the first
                              id that attains it takes the gradient, as in torch
    bags cut, with offsets    every cell sees all ids, and takes those of its own bags

Ids that lie elsewhere are left out before anything is looked up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.comm import Comms, reduce
from weft.runtime.layout.indices import Intervals, extent, locate

SUM, MEAN, MAX = 0, 1, 2
"""How torch numbers its modes of a bag."""
NOWHERE = torch.iinfo(torch.int64).max


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, positions: Tensor, here: Tensor, counted: Tensor, by_count: bool) -> Tensor:
        # what does not count goes to a row behind the last, which is left out: the host need not know how many count
        ctx.save_for_backward(torch.where(counted, positions, len(weight)))
        ctx.rows, ctx.by_count = len(weight), by_count
        if len(weight) == 0:
            return weight.new_zeros(*positions.shape, *weight.shape[1:])
        return weight[positions].masked_fill(~here.unsqueeze(-1), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (rows,) = ctx.saved_tensors
        out = torch.ops.aten.embedding_dense_backward(grad, rows, ctx.rows + 1, ctx.rows, ctx.by_count)
        return out[: ctx.rows], None, None, None, None


def _check_ids(ids: Tensor, num_rows: int) -> None:
    torch._assert_async(
        ((ids >= 0) & (ids < num_rows)).all(), f"an embedding index lies outside the table of {num_rows} rows"
    )


def embedding_part(
    weight: Tensor,
    ids: Tensor,
    *,
    ranges: Intervals,
    num_rows: int,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    """Rows of the ids that lie in `ranges` of the table; zeros for the other ids."""
    _check_ids(ids, num_rows)
    positions, here = locate(ids, ranges)
    out: Tensor = _Lookup.apply(weight, positions, here, here & (ids != padding_idx), scale_grad_by_freq)
    return out


def embedding_bag(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    mode: int = SUM,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    include_last_offset: bool = False,
) -> Tensor:
    """`aten.embedding_bag`: ids of shape (bags, length), or of one dim with offsets."""
    if offsets is None:
        offsets = torch.arange(0, ids.numel(), ids.shape[1], device=ids.device)
        ids = ids.reshape(-1)
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    options = (scale_grad_by_freq, mode, False, per_sample_weights, include_last_offset, padding_idx)
    return torch.ops.aten.embedding_bag.padding_idx(weight, ids, offsets, *options)[0]  # type: ignore[no-any-return]


def embedding_bag_part(  # noqa: PLR0913 - the operator's own arguments, and what is here of each cut
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    mode: int = SUM,
    padding_idx: int | None = None,
    num_rows: int,
    rows: Intervals | None = None,
    bags: Intervals | None = None,
    num_bags: int,
    length: int | None = None,
    comms: Comms = (),
) -> Tensor:
    """The share of one cell: `rows` of the table are here (None: all), `bags` are wanted of `num_bags` (None: all).

    `length` is the whole length of every bag where a dim of ids says it; a mean is then over so many.
    """
    _check_ids(ids, num_rows)
    bag = _bag_of(ids, offsets)
    ids = ids.reshape(-1)
    counted = bag < num_bags
    if padding_idx is not None:
        counted = counted & (ids != padding_idx)
    if bags is not None:
        num_bags = extent(bags)
        bag, wanted = locate(bag, bags)
        counted = counted & wanted
    positions, here = (ids, counted) if rows is None else locate(ids, rows)
    kept = torch.nonzero(here & counted).squeeze(1)
    if mode == MAX:
        out: Tensor = _Maximum.apply(weight, positions[kept], bag[kept], kept, num_bags, comms)
        return out
    weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)[kept]
    total = _sum(weight, positions[kept], bag[kept], weights, num_bags)
    if mode == SUM:
        return total
    if padding_idx is None and length is not None:
        return total / length
    counts = torch.bincount(bag[counted], minlength=num_bags)
    return total / counts.clamp(min=1).unsqueeze(1)


def _bag_of(ids: Tensor, offsets: Tensor | None) -> Tensor:
    """The number of the bag that each id lies in."""
    if offsets is None:
        return torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    return torch.bucketize(torch.arange(len(ids), device=ids.device), offsets, right=True) - 1


def _sum(weight: Tensor, positions: Tensor, bag: Tensor, weights: Tensor | None, num_bags: int) -> Tensor:
    """Sums of the rows at some positions, bag by bag; bags are in order but for the cuts that reorder them."""
    order = torch.argsort(bag, stable=True)
    counts = torch.bincount(bag, minlength=num_bags)
    starts = counts.cumsum(0) - counts
    if len(weight) == 0 or num_bags == 0:
        # no kernel of torch takes these; gradients of zeros must flow all the same
        nothing = weight.sum() + (0 if weights is None else weights.sum())
        return weight.new_zeros(num_bags, weight.shape[1]) + 0 * nothing
    if weights is not None:
        weights = weights[order]
    return embedding_bag(weight, positions[order], starts, weights)


class _Maximum(torch.autograd.Function):
    """The largest of a bag's rows over all cells; the first id that attains it takes the gradient."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, positions: Tensor, bag: Tensor, place: Tensor, num_bags: int, comms: Comms
    ) -> Tensor:
        rows = weight[positions]
        index = bag.unsqueeze(1).expand_as(rows)
        empty = weight.new_full((num_bags, weight.shape[1]), -torch.inf)
        best = reduce(empty.scatter_reduce(0, index, rows, "amax"), comms, "max")
        places = torch.where(rows == best[bag], place.unsqueeze(1), NOWHERE)
        first = torch.full_like(best, NOWHERE, dtype=torch.int64).scatter_reduce(0, index, places, "amin")
        first = reduce(first, comms, "min")
        ctx.save_for_backward(positions, bag, place, first)
        ctx.rows = len(weight)
        return best.masked_fill(first == NOWHERE, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        positions, bag, place, first = ctx.saved_tensors
        addends = torch.where(first[bag] == place.unsqueeze(1), grad[bag], 0)
        out = grad.new_zeros(ctx.rows, grad.shape[1]).index_add_(0, positions, addends)
        return out, None, None, None, None, None

"""Embedding with the vocabulary cut: each cell looks up the rows it holds, and leaves an addend.

In: the local rows of the table, all ids, and which rows are local. Out: the rows of the ids that are here, zeros
elsewhere: the cells' results add up to the lookup. An id outside the whole table raises, as it does uncut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.indices import Intervals, locate


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, positions: Tensor, here: Tensor, counted: Tensor, by_count: bool) -> Tensor:
        ctx.save_for_backward(positions, counted)
        ctx.rows, ctx.by_count = len(weight), by_count
        if len(weight) == 0:
            return weight.new_zeros(*positions.shape, *weight.shape[1:])
        return weight[positions].masked_fill(~here.unsqueeze(-1), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        positions, counted = ctx.saved_tensors
        rows = positions[counted]
        addends = grad[counted]
        if ctx.by_count:
            addends = addends / torch.bincount(rows, minlength=ctx.rows)[rows].unsqueeze(-1)
        out = grad.new_zeros(ctx.rows, grad.shape[-1])
        return out.index_add_(0, rows, addends), None, None, None, None


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
    torch._assert_async(
        ((ids >= 0) & (ids < num_rows)).all(), f"an embedding index lies outside the table of {num_rows} rows"
    )
    positions, here = locate(ids, ranges)
    out: Tensor = _Lookup.apply(weight, positions, here, here & (ids != padding_idx), scale_grad_by_freq)
    return out

"""What a user might write: functions that cells run together in place of an operator. Needs the runtime only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.runtime.comm import Comm, Comms, reduce, sum_over
from weft.runtime.layout.indices import Intervals
from weft.runtime.layout.indices import indices as numbers


def summed_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, comm: Comms) -> Tensor:
    """Softmax along a cut last dim: the largest score, then one sum."""
    here = x.detach().amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:-1], 1), -torch.inf)
    shares = (x - reduce(here, comm, "max")).exp()
    return shares / sum_over(shares.sum(-1, keepdim=True), comm)


class Gathered(torch.autograd.Function):
    """All parts of one dim, put together; their gradients are added up, and each cell takes its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, comm: Comm) -> Tensor:
        parts = comm.all_gather(x.contiguous())
        ctx.dim, ctx.comm = dim, comm
        ctx.start, ctx.length = sum(part.shape[dim] for part in parts[: comm.rank]), x.shape[dim]
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole = ctx.comm.all_reduce(grad.contiguous())
        return whole.narrow(ctx.dim, ctx.start, ctx.length), None, None


def gathered_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, comm: Comms) -> Tensor:
    """Softmax of the whole row on every cell, of which each keeps its part."""
    (one,) = comm
    starts = [len(part) for part in one.all_gather(x.new_zeros(x.shape[-1]))]
    return Gathered.apply(x, -1, one).softmax(-1).narrow(-1, sum(starts[: one.rank]), x.shape[-1])


def wrong_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, comm: Comms) -> Tensor:
    """Forgets to ask the others."""
    return x.softmax(-1)


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    comm: Comms,
    indices: Intervals,
) -> Tensor:
    """Attention along a cut sequence: queries stay, keys and values are gathered."""
    (one,) = comm
    keys, values = (Gathered.apply(x, -2, one) for x in (key, value))
    rows = numbers(indices, query.device)
    mask = torch.cat(one.all_gather(rows)) <= rows.unsqueeze(-1) if is_causal else attn_mask
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


def weighted_mean(x: Tensor, dim: Sequence[int], *, sizes: int) -> Tensor:
    """A part's share of a mean over the last dim."""
    return x.sum(-1) / sizes

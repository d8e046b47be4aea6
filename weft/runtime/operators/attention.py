"""Attention on local parts, with dropout drawn by element and causality by global row.

In: queries, keys and values [..., heads, length, width], the global rows that the queries are if they are cut, and a
Draw over [..., heads, rows, columns] if there is dropout. Out: what `scaled_dot_product_attention` gives for those
rows and heads. With dropout the steps are those of torch's mathematical path, one by one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from weft.runtime.layout.indices import Intervals, indices
from weft.runtime.random import Draw, Stream, dropout


def attention(  # noqa: PLR0913  the operator has as many
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    rows: Intervals | None = None,
    draw: Draw | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """Attention of the local rows and heads. `rows`: the global rows of the queries; None for all of them."""
    if is_causal and (rows is not None or draw is not None):
        mask = causal_mask(rows or ((0, query.shape[-2]),), key.shape[-2], query.device)
    if draw is None:
        causal = is_causal and mask is None
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=enable_gqa
        )
    assert stream is not None, "a draw without its stream"
    weights = attention_weights(query, key, mask, scale, enable_gqa)
    weights = dropout(weights, dropout_p, True, draw=draw, stream=stream)
    return weights @ _repeat_heads(value, query, enable_gqa)


def causal_mask(rows: Intervals, columns: int, device: torch.device) -> Tensor:
    """Which columns each of the global rows may see."""
    return torch.arange(columns, device=device) <= indices(rows, device).unsqueeze(-1)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None, gqa: bool) -> Tensor:
    """The softmax of the scores; rows that see nothing are zero."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # torch scales both factors by the root, which keeps low precision in range
    root = math.sqrt(abs(scale))
    scores = (query * math.copysign(root, scale)) @ (_repeat_heads(key, query, gqa).transpose(-2, -1) * root)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -torch.inf)
        scores = scores + mask
    return torch.ops.aten._safe_softmax.default(scores, -1)  # type: ignore[no-any-return]


def _repeat_heads(x: Tensor, query: Tensor, gqa: bool) -> Tensor:
    if not gqa or x.shape[-3] == query.shape[-3] or x.shape[-3] == 0:
        return x
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3)

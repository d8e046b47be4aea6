"""Attention with fewer key heads than query heads: the same numbers, heads that may be cut finer than the key heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from weft.capture import capture
from weft.plan import Plan, tp
from weft.verify import verify


class Grouped(nn.Module):
    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 4 * key_heads)
        self.value, self.out = nn.Linear(16, 4 * key_heads), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part(x).unflatten(-1, (-1, 4)) for part in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        y = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_key_heads_are_repeated(key_heads: int) -> None:
    graph = capture(Grouped(key_heads), (torch.randn(2, 6, 16),))
    kinds = [op.kind for op in graph.ops]
    assert kinds.count("repeat_interleave") == (0 if key_heads == 4 else 2)
    (attention,) = (op for op in graph.ops if op.kind == "scaled_dot_product_attention")
    assert not dict(attention.kwargs).get("enable_gqa")


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_heads_are_cut_finer_than_key_heads(parts: int) -> None:
    plan = tp(Plan(capture(Grouped(2), (torch.randn(2, 6, 16),)), parts), parts)
    assert str(plan.decision("scaled_dot_product_attention")).startswith("cut h ")
    assert verify(Grouped(2), (torch.randn(2, 6, 16),), plan=f"tp={parts}").equal

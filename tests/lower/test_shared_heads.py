"""Keys and values that are repeated for one attention are shared; whatever else reads them keeps them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from weft.capture import capture
from weft.codegen import generate
from weft.lower import lower
from weft.plan.load import load_plan
from weft.verify import verify

Repeat = Callable[[Tensor], Tensor]


def by_views(x: Tensor) -> Tensor:
    rows, heads, length, width = x.shape
    return x[:, :, None].expand(rows, heads, 2, length, width).reshape(rows, 2 * heads, length, width)


def by_operator(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)


def side_by_side(x: Tensor) -> Tensor:
    """Another order of heads: each query head has another key than if they were shared."""
    rows, heads, length, width = x.shape
    return x[:, None].expand(rows, 2, heads, length, width).reshape(rows, 2 * heads, length, width)


class Attention(nn.Module):
    def __init__(self, repeat: Repeat, *, masked: bool = False, read_twice: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.repeat, self.masked, self.read_twice = repeat, masked, read_twice

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part(x).unflatten(-1, (-1, 4)) for part in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        key, value = self.repeat(key), self.repeat(value)
        mask = x[:, None, :, :6].sigmoid() if self.masked else None
        y = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=not self.masked)
        return (y.square().mean() + key.sum()) if self.read_twice else y.square().mean()


def text_of(module: nn.Module, plan: str) -> str:
    graph = capture(module, (torch.randn(2, 6, 16),))
    return generate(lower(load_plan(plan, graph)))["program.py"].decode()


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "tp=2"])
@pytest.mark.parametrize("repeat", [by_views, by_operator])
def test_heads_are_shared(repeat: Repeat, plan: str) -> None:
    text = text_of(Attention(repeat), plan)
    assert "enable_gqa=True" in text
    assert "expand(" not in text and "repeat_interleave(" not in text


@pytest.mark.parametrize(
    "module",
    [
        Attention(side_by_side),
        Attention(by_views, masked=True),
        Attention(by_views, read_twice=True),
        Attention(by_operator, read_twice=True),
    ],
)
def test_heads_are_not_shared(module: nn.Module) -> None:
    assert "enable_gqa" not in text_of(module, "dp=2")


def test_heads_cut_finer_than_keys_are_not_shared() -> None:
    assert "enable_gqa" not in text_of(Attention(by_operator), "tp=4")


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "tp=4"])
@pytest.mark.parametrize("repeat", [by_views, by_operator, side_by_side])
def test_same_numbers(repeat: Repeat, plan: str) -> None:
    assert verify(Attention(repeat), (torch.randn(2, 6, 16),), plan=plan).equal


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Attention(by_views)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def test_same_numbers_recomputed() -> None:
    assert "enable_gqa=True" in text_of(Wrapped(), "dp=2,recompute=inside")
    assert verify(Wrapped(), (torch.randn(2, 6, 16),), plan="dp=2,recompute=inside").equal

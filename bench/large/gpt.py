"""A GPT as Megatron-LM has it: fused query, key and value, learned positions, a tied head, scores that are written out.

Megatron of 2021 has no flash attention: scores are scaled, masked, made into a softmax, dropped out, and multiplied,
each its own product or kernel (those of the middle in one fused kernel, which plain torch has not).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Sizes:
    """Of a GPT and the batch of a step."""

    layers: int
    width: int
    heads: int
    batch: int
    vocabulary: int = 51200
    length: int = 2048
    dropout: float = 0.0


def dropout(sizes: Sizes) -> nn.Module:
    return nn.Dropout(sizes.dropout) if sizes.dropout else nn.Identity()


class Scores(nn.Module):
    """What selective recomputation runs again: from query, key and value to what they give."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.scale = 1 / math.sqrt(sizes.width // sizes.heads)
        self.dropout = dropout(sizes)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.transpose(2, 3) * self.scale).masked_fill(mask, -10000.0)
        return self.dropout(F.softmax(scores, dim=3)) @ v


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv, self.out = nn.Linear(sizes.width, 3 * sizes.width), nn.Linear(sizes.width, sizes.width)
        self.scores = Scores(sizes)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        y = self.scores(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(sizes)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout1, self.dropout2 = dropout(sizes), dropout(sizes)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x), mask))
        return x + self.dropout2(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class GPT(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.dropout = dropout(sizes)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        length = idx.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=idx.device).triu(1)
        x = self.dropout(self.tokens(idx) + self.positions(torch.arange(length, device=idx.device)))
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(F.linear(self.norm(x), self.tokens.weight).flatten(0, 1), targets.flatten())


def batch(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Tokens, and those that follow them."""
    tokens = torch.zeros(sizes.batch, sizes.length, dtype=torch.int64)
    return tokens, tokens


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """All parameters in one kernel, as Apex's FusedAdam has it."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)

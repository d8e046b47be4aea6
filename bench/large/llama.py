"""Llama 3 as torchtitan has it: grouped queries, rotary positions in complex numbers, torch's attention, an untied
head, a loss in float32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Sizes:
    """Of a Llama and the batch of a step."""

    layers: int
    width: int
    heads: int
    hidden: int
    batch: int
    pairs: int = 8
    vocabulary: int = 128256
    length: int = 8192


def rotations(length: int, width: int) -> Tensor:
    """Real and imaginary parts of the rotation of each position."""
    rates = 1.0 / 500000.0 ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), rates)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    pairs = x.float().unflatten(-1, (-1, 2))
    return (
        torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(turns)[:, None]).flatten(3).type_as(x)
    )


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.each = sizes.width // sizes.heads
        self.repeats = sizes.heads // sizes.pairs
        self.wq = nn.Linear(sizes.width, sizes.width, bias=False)
        self.wk = nn.Linear(sizes.width, sizes.pairs * self.each, bias=False)
        self.wv = nn.Linear(sizes.width, sizes.pairs * self.each, bias=False)
        self.wo = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (one.unflatten(2, (-1, self.each)) for one in (self.wq(x), self.wk(x), self.wv(x)))
        q, k = rotate(q, turns), rotate(k, turns)
        k, v = (one.repeat_interleave(self.repeats, dim=2) for one in (k, v))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(sizes.width, eps=1e-5), nn.RMSNorm(sizes.width, eps=1e-5)
        self.attention = Attention(sizes)
        self.w1 = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.w2 = nn.Linear(sizes.hidden, sizes.width, bias=False)
        self.w3 = nn.Linear(sizes.width, sizes.hidden, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    turns: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.output = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.register_buffer("turns", rotations(sizes.length, sizes.width // sizes.heads))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tok_embeddings(idx)
        for layer in self.layers:
            x = layer(x, self.turns)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def batch(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Tokens, and those that follow them."""
    tokens = torch.zeros(sizes.batch, sizes.length, dtype=torch.int64)
    return tokens, tokens


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """As torchtitan has it by default."""
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)

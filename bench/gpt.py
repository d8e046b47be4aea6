"""The GPT that benches train: plain torch, so that every revision of Weft can be given the same file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Sizes:
    """Of a GPT and its batch."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    length: int = 128
    vocabulary: int = 8192
    batch: int = 8


SIZES = Sizes()


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, sizes: Sizes = SIZES) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(sizes.vocabulary, sizes.width),
            nn.Embedding(sizes.length, sizes.width),
        )
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def model(sizes: Sizes = SIZES) -> nn.Module:
    torch.manual_seed(0)
    return GPT(sizes)


def example(batch: int | None = None, sizes: Sizes = SIZES) -> tuple[Tensor, Tensor]:
    """Tokens, and those that follow them."""
    torch.manual_seed(1)
    tokens = torch.randint(sizes.vocabulary, (sizes.batch if batch is None else batch, sizes.length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

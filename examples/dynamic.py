"""A model file whose batches may have any size and length: a small GPT with rotary positions and dropout.

`weft.dynamic` marks the dims of the example that may vary; one generated program then serves them all.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

import weft

VOCABULARY, WIDTH, HEADS, LAYERS = 48, 32, 4, 2


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs of features turned by an angle that grows with the place in the text."""
    T, D = x.shape[-2:]
    turns = torch.arange(T, device=x.device)[:, None] / 100 ** (torch.arange(0, D, 2, device=x.device) / D)
    cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in self.qkv(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).reshape(B, T, C)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class AnyLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(idx)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def model() -> nn.Module:
    torch.manual_seed(0)
    return AnyLength()


def batch(size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (size, length + 1), generator=torch.Generator().manual_seed(size * length))
    return tokens[:, :-1], tokens[:, 1:]


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of all sorts: the first dims are what `example` marks."""
    for step in range(1000):
        yield batch(4 + 2 * (step % 3), 8 + step % 5)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    idx, targets = batch(4, 12)
    return weft.dynamic(idx, 0, 1), weft.dynamic(targets, 0, 1)

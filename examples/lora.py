"""LoRA: a language model whose own weights are frozen; beside each matrix a product of two thin ones is trained.

Frozen weights are cut like any others and have no gradient, no synchronisation and no optimizer state.

    weft verify examples/lora.py --plan "dp=2,tp=2"
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HEADS, LENGTH, ROWS, RANK = 48, 32, 4, 12, 4, 4


class LoRA(nn.Module):
    """A frozen linear map, and what is learned beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        # zeros at first, as usual, would leave `down` without a gradient in the first step
        self.up = nn.Parameter(torch.randn(base.out_features, RANK) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (m(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def adapt(model: nn.Module, names: tuple[str, ...] = ("query", "value", "up", "down")) -> nn.Module:
    """Freeze a model and put LoRA around the linear maps of these names."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, LoRA(child))
    return model


def model() -> nn.Module:
    torch.manual_seed(0)
    return adapt(Model())


def example() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=draws)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

"""Small modules and batches for the tests of training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS = 12


class Tower(nn.Module):
    """Four linear layers, the third of which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4))
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 3):
            x = torch.tanh(self.layers[number](x))
        return x.square().mean()


def batch() -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def shares(num_ranks: int) -> list[Tensor]:
    return list(batch().chunk(num_ranks))

"""A model file: two linear layers with dropout between them, and a squared loss."""

import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = self.down(self.dropout(torch.nn.functional.gelu(self.up(x))))
        return (y - target).square().mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return MLP(width=16, hidden=32)


def example() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(12, 16), "target": torch.randn(12, 16)}

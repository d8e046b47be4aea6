"""A wide MLP for `bench/predict.py`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTH, LAYERS, ROWS = 1536, 4, 64


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return F.mse_loss(x, y)


def model() -> nn.Module:
    torch.manual_seed(0)
    return MLP()


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)

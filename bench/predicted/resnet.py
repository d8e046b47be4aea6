"""A ResNet of basic blocks for `bench/predict.py`."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTHS, SIDE, CLASSES, ROWS = (32, 32, 64, 64, 128, 128), 32, 100, 16


class Block(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        stride = 1 if width == out else 2
        self.first = nn.Conv2d(width, out, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity() if width == out else nn.Conv2d(width, out, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTHS[0], 3, padding=1)
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in pairwise(WIDTHS)))
        self.head = nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem(images)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def model() -> nn.Module:
    torch.manual_seed(0)
    return ResNet()


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(ROWS, 3, SIDE, SIDE, generator=generator)
    return images, torch.randint(CLASSES, (ROWS,), generator=generator)

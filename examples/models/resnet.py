"""A model file: a ResNet of bottleneck blocks, in plain PyTorch, batch norm in training mode.

Interesting to cut: the statistics of a batch norm run over the whole batch, whoever holds its rows, and its running
buffers must come out equal too; channels are cut through three convolutions and the shortcut that is added to them.
"""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, EXPANSION, SIDE, CLASSES, ROWS = 12, 2, 16, 12, 8


class Bottleneck(nn.Module):
    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = EXPANSION * width
        self.reduce = nn.Conv2d(channels_in, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.mix = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, channels_out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            projection = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.reduce(x)))
        y = F.relu(self.norm2(self.mix(y)))
        return F.relu(self.norm3(self.expand(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.Sequential(
            Bottleneck(WIDTH, WIDTH, stride=1),
            Bottleneck(EXPANSION * WIDTH, WIDTH, stride=1),
            Bottleneck(EXPANSION * WIDTH, 2 * WIDTH, stride=2),
            Bottleneck(2 * EXPANSION * WIDTH, 2 * WIDTH, stride=1),
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(2 * EXPANSION * WIDTH, CLASSES)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.norm(self.stem(images))))
        x = F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1)
        return F.cross_entropy(self.head(self.dropout(x)), labels, label_smoothing=0.1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return ResNet()


def example() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, 3, SIDE, SIDE), torch.randint(CLASSES, (ROWS,))

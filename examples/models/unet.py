"""A model file: a diffusion U-Net in plain PyTorch, trained to predict the noise that was added to images.

Interesting to cut: group norms whose groups are whole on a device only if channels are cut by groups; an embedding of
the time step that is added to every pixel; self-attention over the pixels at low resolution; long skips that come
back through `cat`, so that a cut of the channels lies in two pieces. The noise itself is drawn in the model.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, GROUPS, HEADS, SIDE, STEPS, ROWS = 24, 6, 6, 16, 100, 8
EMBEDDED = 4 * WIDTH


class ResidualBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.time = nn.Linear(EMBEDDED, channels_out)
        self.norm2 = nn.GroupNorm(GROUPS, channels_out)
        self.dropout = nn.Dropout(0.1)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.skip = nn.Conv2d(channels_in, channels_out, 1) if channels_in != channels_out else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        y = self.conv2(self.dropout(F.silu(self.norm2(y))))
        return y + self.skip(x)


class PixelAttention(nn.Module):
    """Every pixel attends to all pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, C, H, W = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(B, 3, HEADS, C // HEADS, H * W).transpose(3, 4).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(2, 3).reshape(B, C, H, W))


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, EMBEDDED), nn.SiLU(), nn.Linear(EMBEDDED, EMBEDDED))
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down1 = ResidualBlock(WIDTH, WIDTH)
        self.shrink = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.down2 = ResidualBlock(WIDTH, 2 * WIDTH)
        self.middle1 = ResidualBlock(2 * WIDTH, 2 * WIDTH)
        self.attention = PixelAttention(2 * WIDTH)
        self.middle2 = ResidualBlock(2 * WIDTH, 2 * WIDTH)
        self.up2 = ResidualBlock(4 * WIDTH, 2 * WIDTH)
        self.grow = Upsample(2 * WIDTH)
        self.up1 = ResidualBlock(3 * WIDTH, WIDTH)
        self.norm = nn.GroupNorm(GROUPS, WIDTH)
        self.head = nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        time = self.time(sinusoids(steps, WIDTH))
        first = self.down1(self.stem(x), time)
        second = self.down2(self.shrink(first), time)
        y = self.middle2(self.attention(self.middle1(second, time)), time)
        y = self.grow(self.up2(torch.cat([y, second], dim=1), time))
        y = self.up1(torch.cat([y, first], dim=1), time)
        return self.head(F.silu(self.norm(y)))


class Diffusion(nn.Module):
    """The loss of one step of training: noise is added by the step's share, and asked back."""

    def __init__(self) -> None:
        super().__init__()
        self.network = UNet()
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS), dim=0)
        self.register_buffer("signal", kept.sqrt())
        self.register_buffer("spread", (1 - kept).sqrt())

    def forward(self, images: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(images)
        signal, spread = (share[steps][:, None, None, None] for share in (self.signal, self.spread))
        return F.mse_loss(self.network(signal * images + spread * noise, steps), noise)


def sinusoids(steps: torch.Tensor, width: int) -> torch.Tensor:
    half = width // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, device=steps.device) / half)
    angles = steps[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Diffusion()


def example() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, 3, SIDE, SIDE), torch.randint(STEPS, (ROWS,))

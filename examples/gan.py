"""A small GAN: two modules with different plans in one training loop.

The generator is drawn under `dp=2`, the discriminator under `tp=2`; neither returns a loss. The loop around them is
ordinary PyTorch and runs the same on every rank: losses, `detach()` and the two optimizers are the user's own.

    torchrun --nproc-per-node 2 examples/gan.py        # or: python examples/gan.py, with emulated devices
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft

ROWS, NOISE, WIDTH = 16, 4, 32


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(NOISE, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, 2)

    def forward(self, noise: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(noise))))


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, WIDTH)
        self.down = nn.Linear(WIDTH, 1)

    def forward(self, points: Tensor) -> Tensor:
        return self.down(F.leaky_relu(self.up(points), 0.2)).squeeze(-1)


def parts(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Generator and discriminator, the same in every process."""
    torch.manual_seed(0)
    return Generator().to(dtype), Discriminator().to(dtype)


def parallel(dtype: torch.dtype = torch.float32, *, emulate: bool = False) -> tuple[nn.Module, nn.Module]:
    """The same two, each under a plan of its own. Gradients flow through the discriminator to its input."""
    generator, discriminator = parts(dtype)
    noise, points = torch.zeros(ROWS, NOISE, dtype=dtype), torch.zeros(ROWS, 2, dtype=dtype, requires_grad=True)
    return (
        weft.parallelize(generator, noise, "dp=2", emulate=emulate, cache=None),
        weft.parallelize(discriminator, points, "tp=2", emulate=emulate, cache=None),
    )


def train(
    generator: nn.Module, discriminator: nn.Module, steps: int, dtype: torch.dtype = torch.float32
) -> list[float]:
    """Alternating steps; the losses of both."""
    draws = torch.Generator().manual_seed(1)
    ones, zeros = torch.ones(ROWS, dtype=dtype), torch.zeros(ROWS, dtype=dtype)
    teach = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
    learn = torch.optim.Adam(generator.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        angle = torch.rand(ROWS, generator=draws, dtype=dtype) * 2 * torch.pi
        real = torch.stack([angle.cos(), angle.sin()], dim=1)
        fake = generator(torch.randn(ROWS, NOISE, generator=draws, dtype=dtype))

        teach.zero_grad()
        told_real = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        told_fake = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        (told_real + told_fake).backward()
        teach.step()

        learn.zero_grad()
        fooled = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
        fooled.backward()
        learn.step()
        losses += [(told_real + told_fake).item(), fooled.item()]
    return losses


if __name__ == "__main__":
    found = train(*parallel(emulate="RANK" not in os.environ), steps=20)
    if os.environ.get("RANK", "0") == "0":
        print(f"discriminator {found[0]:.4f} -> {found[-2]:.4f}, generator {found[1]:.4f} -> {found[-1]:.4f}")

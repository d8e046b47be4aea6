"""A program written by hand, as the compiler would write it: four layers, the third of which nobody calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.runtime.program.module import ParallelModule, Part
from weft.runtime.weights.products import linear

ROWS = 12
WEIGHT = Part((6, 6), dtype=torch.float64, sync="dp")
LAYERS = {f"layers.{i}.weight": WEIGHT for i in range(4)} | {"scale": Part((6,), dtype=torch.float64, sync="dp")}


def tower(num_ranks: int, recompute: bool = False) -> type[ParallelModule]:
    """The class for so many ranks, each of which has its share of the rows."""

    class Tower(ParallelModule, grid={"dp": num_ranks}, parameters=LAYERS):
        def forward(self, x: Tensor) -> Tensor:
            for number in (0, 1, 3):
                x = self.recompute(self.layer, x, number) if recompute else self.layer(x, number)
            share = (self.model.scale * x).square().mean() / num_ranks
            loss = self.comm.all_reduce(share, over="dp")
            return self.finish(loss, share)

        def layer(self, x: Tensor, number: int) -> Tensor:
            return torch.tanh(linear(x, self.model.layers[number].weight))

    return Tower


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(part.shape, generator=generator, dtype=torch.float64) for name, part in LAYERS.items()}


def batch() -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def shares(num_ranks: int) -> list[Tensor]:
    return list(batch().chunk(num_ranks))


def eager(times: int = 1) -> dict[str, Tensor]:
    """The gradients on one device."""
    weights: dict[str, Any] = {name: tensor.requires_grad_() for name, tensor in state().items()}
    x = batch()
    for number in (0, 1, 3):
        x = torch.tanh(F.linear(x, weights[f"layers.{number}.weight"]))
    (weights["scale"] * x).square().mean().backward()
    return {name: torch.zeros_like(w) if w.grad is None else w.grad * times for name, w in weights.items()}

"""Llama 3 70B: torchtitan's docs/performance.md."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bench.large.llama import Llama, Sizes, adam, batch

SIZES = Sizes(layers=80, width=8192, heads=64, hidden=28672, batch=64)


def model() -> nn.Module:
    return Llama(SIZES)


def example() -> tuple[Tensor, Tensor]:
    return batch(SIZES)


def optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return adam(parameters)


def precision() -> str:
    return "bf16"

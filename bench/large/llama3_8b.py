"""Llama 3 8B: torchtitan's benchmarks/llama3_h100_202412_torchtitan.md and docs/performance.md."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bench.large.llama import Llama, Sizes, adam, batch

SIZES = Sizes(layers=32, width=4096, heads=32, hidden=14336, batch=16)


def model() -> nn.Module:
    return Llama(SIZES)


def example() -> tuple[Tensor, Tensor]:
    return batch(SIZES)


def optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return adam(parameters)


def precision() -> str:
    return "bf16"

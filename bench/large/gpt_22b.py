"""Megatron's GPT of 22 billion parameters: arXiv 2205.05198, Tables 3 and 5."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bench.large.gpt import GPT, Sizes, adam, batch

SIZES = Sizes(layers=48, width=6144, heads=64, batch=4)


def model() -> nn.Module:
    return GPT(SIZES)


def example() -> tuple[Tensor, Tensor]:
    return batch(SIZES)


def optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return adam(parameters)


def precision() -> str:
    return "fp16"

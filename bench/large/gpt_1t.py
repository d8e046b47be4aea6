"""Megatron's GPT of 1,008 billion parameters: arXiv 2104.04473, Table 1; arXiv 2205.05198, Tables 3 and 5."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bench.large.gpt import GPT, Sizes, adam, batch

SIZES = Sizes(layers=128, width=25600, heads=160, batch=512)


def model() -> nn.Module:
    return GPT(SIZES)


def example() -> tuple[Tensor, Tensor]:
    return batch(SIZES)


def optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return adam(parameters)


def precision() -> str:
    return "fp16"

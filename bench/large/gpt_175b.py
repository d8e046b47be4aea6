"""GPT-3 as Megatron-LM's examples/pretrain_gpt3_175B.sh trains it, on 1,024 devices."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bench.large.gpt import GPT, Sizes, adam, batch

SIZES = Sizes(layers=96, width=12288, heads=96, batch=1536)


def model() -> nn.Module:
    return GPT(SIZES)


def example() -> tuple[Tensor, Tensor]:
    return batch(SIZES)


def optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return adam(parameters)


def precision() -> str:
    return "fp16"

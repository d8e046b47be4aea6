"""A GPT for `bench/predict.py`."""

import torch
from torch import Tensor, nn

from bench.gpt import GPT, Sizes

SIZES = Sizes(layers=4, width=256, heads=4, length=128, vocabulary=4096, batch=8)


def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(SIZES)


def example() -> tuple[Tensor, Tensor]:
    idx = torch.randint(SIZES.vocabulary, (SIZES.batch, SIZES.length + 1), generator=torch.Generator().manual_seed(0))
    return idx[:, :-1].contiguous(), idx[:, 1:].contiguous()

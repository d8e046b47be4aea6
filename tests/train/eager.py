"""The eager side of the comparisons: the same steps, drawing from the same stream."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import GPT, MLP, GPTConfig, gpt_example
from weft.runtime.random import Stream
from weft.runtime.training.step import call
from weft.verify.draw_mode import DrawMode

STEPS = 3


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    # a large epsilon: without it a gradient that is zero but for rounding moves its weight by a whole learning rate
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)


def train_eager(module: nn.Module, batch: Any, *, seed: int = 0) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final state of a copy of the module."""
    module = copy.deepcopy(module)
    optimizer = adamw(module)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        with DrawMode(Stream(seed, step, 0)):
            loss = call(module, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(module.state_dict())


def gpt(**changes: Any) -> tuple[nn.Module, Any]:
    config = GPTConfig(n_layer=1, **changes)
    torch.manual_seed(0)
    return GPT(config).double(), gpt_example(config)


def mlp() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    return MLP(dropout=0.1).double(), {"x": x, "y": y}


def check_same(found: tuple[list[float], dict[str, Tensor]], wanted: tuple[list[float], dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-13)
    assert found[1].keys() == wanted[1].keys()
    for name, tensor in wanted[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")

"""A parallel module in `torch.utils.checkpoint`: backward computes its forward again, as in eager, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.train.ranks import on_ranks
from weft.errors import WeftError

PLANS = ["dp=2", "tp=2", "dp=2,zero=1", "dp=2,zero=3", "dp=2,recompute=full"]


class Body(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.dropout = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(dropout)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.up(x).tanh()))


def batch() -> Tensor:
    made = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return made.requires_grad_()


def gradients(module: Any, reentrant: bool) -> list[Tensor]:
    """Of the input, of what stands around it, and whole parameters, after two updates; the region has it twice."""
    around = nn.Linear(6, 6).double()
    nn.init.constant_(around.weight, 0.3)
    nn.init.zeros_(around.bias)
    optimizer = torch.optim.SGD([*module.parameters(), *around.parameters()], 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        x = batch()
        y = checkpoint(lambda x: around(module(x.sin()).tanh() + module(x)), x, use_reentrant=reentrant)
        checkpoint(module, y, use_reentrant=reentrant).square().mean().backward()
        optimizer.step()
    held = (*module.parameters(), *around.parameters())
    return [x.grad, *(weft.full_tensor(one.grad) for one in held), *map(weft.full_tensor, held)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_it_is_as_in_eager(plan: str, reentrant: bool) -> None:
    expected = gradients(Body(), reentrant)
    for found in on_ranks(Body(), (batch(),), plan, lambda module: gradients(module, reentrant), outputs="all"):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_its_forward_in_python_runs_as_before() -> None:
    module = weft.parallelize(Body(), (batch(),), "dp=1", cache=None)
    torch.testing.assert_close(gradients(module, False), gradients(Body(), False), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("settings", [{"plan": "dp=1"}, {"plan": "dp=2", "emulate": True}])
def test_what_would_draw_other_numbers_is_refused(settings: dict[str, Any], reentrant: bool) -> None:
    module = weft.parallelize(Body(0.5), (batch(),), cache=None, **settings)
    y = checkpoint(lambda x: module(x).tanh().exp(), batch(), use_reentrant=reentrant)
    with pytest.raises(WeftError, match=r"draws random numbers(.|\n)*checkpoint inside of the model"):
        y.sum().backward()
    # not inside of it
    module(batch()).sum().backward()

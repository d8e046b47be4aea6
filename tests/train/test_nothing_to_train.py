"""What cannot be trained, or says no plan, is told in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from weft.errors import PlanError, WeftError

X = torch.randn(4, 8)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("plan", [None, 3])
def test_no_plan(plan: object) -> None:
    with pytest.raises(PlanError, match=f"the plan is {plan}") as caught:
        weft.parallelize(Loss(), X, plan, emulate=True)  # type: ignore[arg-type]
    assert "dp=2" in caught.value.remedy


@pytest.mark.parametrize("plan", ["dp=2", "pp=2"])
def test_all_parameters_are_frozen(plan: str) -> None:
    with pytest.raises(WeftError, match=r"nothing to train|no trained parameter"):
        parallel = weft.parallelize(Loss().requires_grad_(False), X, plan, emulate=True)
        parallel.forward_backward(X)

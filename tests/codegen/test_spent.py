"""Scores that a loss may write over: those of a product that nobody else reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.capture import capture
from weft.codegen import generate
from weft.lower import lower
from weft.plan.load import load_plan
from weft.verify import verify

Between = Callable[[Tensor], Tensor]


class Classifier(nn.Module):
    def __init__(self, between: Between, *, read_twice: bool = False) -> None:
        super().__init__()
        self.head, self.between, self.read_twice = nn.Linear(6, 10), between, read_twice

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        scores = self.between(self.head(x)).flatten(0, 1)
        loss = F.cross_entropy(scores, target.flatten())
        return loss + scores.square().mean() if self.read_twice else loss


BATCH = (torch.randn(4, 3, 6), torch.randint(10, (4, 3)))


def text_of(module: nn.Module, plan: str) -> str:
    return generate(lower(load_plan(plan, capture(module, BATCH))))["program.py"].decode()


@pytest.mark.parametrize("plan", ["dp=1", "dp=2"])
@pytest.mark.parametrize("between", [lambda x: x, lambda x: x.float(), lambda x: 0.5 * x])
def test_scores_are_written_over(between: Between, plan: str) -> None:
    assert "reuse=True" in text_of(Classifier(between), plan)


@pytest.mark.parametrize(
    "module",
    [Classifier(torch.tanh), Classifier(lambda x: x, read_twice=True), Classifier(lambda x: F.softmax(x, -1))],
)
def test_scores_are_kept(module: nn.Module) -> None:
    assert "reuse" not in text_of(module, "dp=2")


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "tp=2"])
@pytest.mark.parametrize("between", [lambda x: x, torch.tanh])
def test_same_numbers(between: Between, plan: str) -> None:
    assert verify(Classifier(between), BATCH, plan=plan).equal


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Classifier(lambda x: x)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.inside(x, target)


def test_same_numbers_recomputed() -> None:
    assert "reuse=True" in text_of(Wrapped(), "dp=2,recompute=inside")
    assert verify(Wrapped(), BATCH, plan="dp=2,recompute=inside").equal

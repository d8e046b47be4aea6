"""A model whose own train() or eval() does more than setting modes is refused, and stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.train.ranks import on_ranks
from weft.errors import RunError

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
plans = pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3", "dp=2,spread", "pp=2,microbatches=2,stages=b"])


class Adapted(nn.Linear):
    """A layer with adapters, which `train(mode)` merges in one of several ways."""

    how = "data"

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))
        self.is_merged, self.log = False, list[bool]()
        self.register_buffer("count", torch.zeros(()))

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if mode == self.is_merged:
            getattr(self, f"merge_{self.how}")(-1 if mode else 1)
        return self

    def merge_data(self, sign: int) -> None:
        self.is_merged = sign > 0
        self.weight.data += sign * self.up @ self.down

    def merge_other(self, sign: int) -> None:
        self.weight.data = self.weight + sign * self.up @ self.down

    def merge_parameter(self, sign: int) -> None:
        self.weight = nn.Parameter(self.weight + sign * self.up @ self.down)

    def merge_caught(self, sign: int) -> None:
        with suppress(Exception):
            self.count.add_(1)

    def merge_attribute(self, sign: int) -> None:
        self.is_merged = sign > 0

    def merge_list(self, sign: int) -> None:
        self.log.append(sign > 0)

    def merge_frozen(self, sign: int) -> None:
        self.down.requires_grad_(sign < 0)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if self.is_merged else x + x @ self.down.T @ self.up.T


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = Adapted(), nn.Linear(4, 4)
        self.a.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).square().mean()


WAYS = ["data", "other", "parameter", "caught", "attribute", "list", "frozen"]


def everywhere(model: nn.Module, plan: str, body: Callable[[Any], Any]) -> None:
    body(weft.parallelize(model, (X,), plan, emulate=True, cache=None))
    on_ranks(model, (X,), plan, body)


def refused_and_kept(how: str, plan: str) -> None:
    torch.manual_seed(0)
    model = Net(how).double()
    state, weight = copy.deepcopy(model.state_dict()), model.a.weight

    def body(parallel: Any) -> None:
        for call in (parallel.eval, lambda: parallel.train(False), parallel.a.eval):
            with pytest.raises(RunError, match=r"train\(\) of Adapted changes .*a\.\w+, and programs") as caught:
                call()
            assert "test_own_modes.py:" in str(caught.value) and "try:" in str(caught.value)
            assert parallel.training and parallel.a.training
        parallel.train()

    everywhere(model, plan, body)
    assert model.a.weight is weight and not model.a.is_merged and not model.a.log and model.a.down.requires_grad
    assert model.training and model.a.training
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


@plans
def test_a_merge_in_eval_is_refused(plan: str) -> None:
    refused_and_kept("data", plan)


@pytest.mark.parametrize("how", WAYS)
def test_ways_to_merge(how: str) -> None:
    refused_and_kept(how, "dp=2")


def test_verify_says_that_eval_would_fail() -> None:
    model = Net("data")
    state = copy.deepcopy(model.state_dict())
    found = weft.verify(model, (X.float(),), plan="dp=2")
    assert "evaluation is not compared" in str(found) and "train() of Adapted changes a.weight" in str(found)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


class OwnEval(nn.Module):
    """Its eval() is another thing than train(False), and that of a part keeps the norm as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Keeping()

    def eval(self) -> OwnEval:
        super().eval()
        self.part.norm.train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x).square().mean()


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0)

    def train(self, mode: bool = True) -> Keeping:
        before = self.norm.training
        super().train(mode)
        self.norm.train(before)
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.lin(x))
        return self.drop(x) * (1.0 if self.training else 2.0)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_modes_of_its_own_are_followed(plan: str) -> None:
    torch.manual_seed(0)
    start = OwnEval().double()
    changes: list[Callable[[Any], Any]] = [
        lambda one: one.eval(),
        lambda one: one.train(),
        lambda one: one.part.norm.eval(),
        lambda one: one.part.train(),
        lambda one: one.part.eval(),
        lambda one: one.train(False),
        lambda one: one.train(),
    ]

    def body(parallel: Any) -> None:
        eager = copy.deepcopy(start)
        for change in changes:
            for one in (eager, parallel):
                change(one)
            with torch.no_grad():
                torch.testing.assert_close(parallel(X), eager(X), rtol=0, atol=1e-12)
            paths = [path for path, _ in eager.named_modules()]
            modes = [parallel.get_submodule(path).training if path else parallel.training for path in paths]
            assert modes == [one.training for one in eager.modules()]

    everywhere(start, plan, body)

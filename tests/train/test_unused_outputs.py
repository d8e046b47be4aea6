"""Outputs that a loop does not use: `.grad` is None exactly where eager's is, so that optimizers pass over the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.train.ranks import on_ranks


class Heads(nn.Module):
    """A trunk, two heads, a parameter of both, and one that is tied into the second."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.first, self.second = nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.second[0].weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.scale * self.first(x), self.scale * self.second(self.tied(x))


def heads() -> Heads:
    torch.manual_seed(0)
    return Heads().double()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


PLANS = [
    "dp=1",
    "dp=2",
    "tp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=2,spread",
    "dp=2,recompute=second.*",
    "dp=2,coshard=2",
]
USED = {"first": [(0,)] * 2, "second": [(1,)] * 2, "in turn": [(0,), (1,), (0,)], "both": [(0, 1), (0,)]}


def losses(module: Any, used: tuple[int, ...], step: int) -> Tensor:
    outputs = module(batch(step))
    return sum((outputs[at].square().mean() for at in used), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("plan", PLANS)
def test_weights_after_some_steps(plan: str, used: str, set_to_none: bool) -> None:
    """Momentum and weight decay move what has a gradient of zeros, and leave what has none."""
    eager = heads()
    parallel: Any = weft.parallelize(copy.deepcopy(eager), (batch(),), plan, emulate=True, cache=None)
    for module in (eager, parallel):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
        for step, outputs in enumerate(USED[used]):
            optimizer.zero_grad(set_to_none=set_to_none)
            losses(module, outputs, step).backward()
            optimizer.step()
    torch.testing.assert_close(parallel.state_dict(), eager.state_dict(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_which_gradients_there_are(plan: str) -> None:
    """Over one backward, several that add up, two forwards in one, and a penalty of the caller's own."""

    def found(module: Any) -> list[list[str]]:
        told = []

        def look() -> None:
            told.append(sorted(name for name, one in module.named_parameters() if one.grad is not None))

        losses(module, (0,), 0).backward()
        look()
        losses(module, (1,), 1).backward()
        look()
        module.zero_grad()
        losses(module, (1,), 0).backward()
        losses(module, (1,), 1).backward()
        look()
        module.zero_grad()
        (losses(module, (0,), 0) + losses(module, (1,), 1)).backward()
        look()
        module.zero_grad()
        (losses(module, (1,), 0) + module.get_parameter("first.weight").square().sum()).backward()
        look()
        module.zero_grad()
        first, second = module(batch())
        first.sum().backward(retain_graph=True)
        look()
        second.sum().backward()
        look()
        return told

    expected = found(heads())
    assert len(set(map(tuple, expected))) > 2

    for told in on_ranks(heads(), (batch(),), plan, found, outputs="all"):
        assert told == expected


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(y)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3"])
def test_inputs_of_an_output_that_is_not_used(plan: str) -> None:
    """What stands before a part of a model is trained through the outputs that are used."""
    torch.manual_seed(0)
    part, before = Parts().double(), nn.ModuleList([nn.Linear(6, 6).double() for _ in range(2)])
    x = batch()
    parallel: Any = weft.parallelize(part, (before[0](x), before[1](x)), plan, emulate=True, cache=None)
    for one in (part, parallel):
        before.zero_grad()
        outputs = one(before[0](x), before[1](x))
        outputs[1].square().sum().backward()
        assert [layer.weight.grad is None for layer in before] == [True, False]


@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3"])
def test_what_is_frozen_for_the_time_being(plan: str, emulated: bool) -> None:
    """Outputs that are made of frozen parameters alone require no gradient, until these are trained again."""

    def work(module: Any) -> list[Any]:
        found: list[Any] = []
        for step in range(9):
            module.requires_grad_(step not in (1, 2))
            if step == 3:
                for one in (module.trunk, module.first):
                    one.requires_grad_(False)
                module.scale.requires_grad_(False)
            if step == 4:
                module.second.requires_grad_(False)
            module.zero_grad()
            outputs = module(batch(step))
            needs = [one.requires_grad for one in outputs]
            found.append([needs, [one.grad_fn is None for one in outputs]])
            if any(needs):
                sum(one.square().mean() for one in outputs).backward()
            found.append([one.grad is None for one in getattr(module, "ranks", [module])[0].parameters()])
        return found

    wanted = work(heads())
    if emulated:
        parallel = weft.parallelize(heads(), (batch(),), plan, emulate=True, cache=None)
        assert work(EveryRank(parallel)) == wanted
    else:
        assert on_ranks(heads(), (batch(),), plan, work, outputs="any") == [wanted] * 2


class EveryRank:
    """Freezes what the ranks of an emulated module have."""

    def __init__(self, parallel: Any, path: str = "") -> None:
        self._parallel, self._path = parallel, path
        self.ranks = parallel.ranks

    def __call__(self, *args: Any) -> Any:
        return self._parallel(*args)

    def __getattr__(self, name: str) -> Any:
        return EveryRank(self._parallel, f"{self._path}.{name}".lstrip("."))

    def zero_grad(self) -> None:
        self._parallel.zero_grad()

    def requires_grad_(self, required: bool) -> None:
        for name, one in self._parallel.named_parameters():
            if f"{name.split('.', 2)[2]}.".startswith(f"{self._path}." if self._path else ""):
                one.requires_grad_(required)

"""Parameters, buffers and state dicts of a parallel module come in the original's order: optimizer states go by it."""

from __future__ import annotations

import copy
from operator import is_
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft


class Net(nn.Module):
    """Made in another order than it is used in; a tied weight, buffers, a frozen parameter, one without use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bound", torch.ones(8), persistent=False)
        self.head = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 3)
        self.scale = nn.ParameterDict({"late": torch.ones(8), "early": torch.ones(8)})
        # later layers first
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("1", "0")})
        self.norm = nn.BatchNorm1d(8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.first = nn.Linear(8, 8)
        self.first.weight = self.tied.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.frozen(self.first(x * self.scale["early"])))
        for name in ("0", "1"):
            h = torch.tanh(self.layers[name](h))
        h = self.norm(self.tied(h)) * self.scale["late"] * self.bound
        return self.head(h).square().mean()


def batch(seed: int = 0) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def net() -> Any:
    torch.manual_seed(0)
    return Net().double()


def parallel_of(plan: str, **options: Any) -> Any:
    return weft.parallelize(net(), (batch(),), plan, emulate=True, cache=None, **options)


def check_order(parallel: Any) -> None:
    """Each rank's names are the original's, without buffers that it holds nothing of; all of them together are all."""
    model, seen = net(), set[str]()
    for rank in parallel.ranks:
        seen.update(rank.stored)
        for twice in (False, True):
            for kind in ("named_parameters", "named_buffers"):
                original = [name for name, _ in getattr(model, kind)(remove_duplicate=not twice)]
                found = [name for name, _ in getattr(rank, kind)(remove_duplicate=not twice)]
                assert found == [name for name in original if "buffers" not in kind or name in rank.stored]
        assert list(rank.state_dict()) == [name for name in model.state_dict() if name in rank.stored]
        held = [one for name, one in rank.named_parameters()]
        assert all(map(is_, held, rank.parameters())) and len(held) == len(list(model.parameters()))
    assert seen == {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    assert list(parallel.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3", "dp=2,spread", "pp=2,microbatches=2"])
def test_what_a_module_shows_is_in_the_order_of_the_original(plan: str) -> None:
    check_order(parallel_of(plan))


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,microbatches=2"])
def test_so_are_masters(plan: str) -> None:
    torch.manual_seed(0)
    found = weft.parallelize(Net(), (batch().float(),), plan, emulate=True, cache=None, precision="bf16")
    check_order(found)


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=1", "dp=3,zero=3", "dp=2,spread", "pp=2,microbatches=1"])
def test_the_state_of_an_eager_optimizer_goes_on_where_it_was(plan: str, has_stepped: bool) -> None:
    eager, steps = net(), [batch(seed) for seed in range(6)]
    ours = torch.optim.AdamW(eager.parameters(), lr=0.01)
    for x in steps[:3]:
        ours.zero_grad()
        eager(x).backward()
        ours.step()
    parallel = parallel_of(plan, weights=eager.state_dict())
    theirs = [torch.optim.AdamW(rank.parameters(), lr=0.01) for rank in parallel.ranks]
    for one in theirs:
        if has_stepped:
            one.step()
        one.load_state_dict(copy.deepcopy(ours.state_dict()))
    for x in steps[3:]:
        for module, optimizers in ((eager, [ours]), (parallel, theirs)):
            module.zero_grad()
            module.forward_backward((x,)) if module is parallel else module(x).backward()
            for one in optimizers:
                one.step()
    for name, tensor in eager.state_dict().items():
        torch.testing.assert_close(parallel.state_dict()[name], tensor, rtol=1e-9, atol=1e-12, msg=name)

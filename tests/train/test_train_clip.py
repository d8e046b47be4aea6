"""Clipping by the norm of all gradients: as on one device, each element counted once."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.train.eager import gpt
from tests.train.ranks import on_ranks
from weft.errors import RunError
from weft.runtime.layout.index import size
from weft.runtime.random import Stream
from weft.runtime.training.shard_owners import ShardOwners
from weft.runtime.training.step import call
from weft.verify.draw_mode import DrawMode


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3", "dp=2,tp=2"])
@pytest.mark.parametrize("bound", [0.05, 100.0])
def test_it_is_torchs_on_one_device(plan: str, bound: float) -> None:
    model, example = gpt()
    parallel = weft.parallelize(copy.deepcopy(model), example, plan, emulate=True, cache=None)
    with DrawMode(Stream(0, 0, 0)):
        call(model, example).backward()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
    call(parallel, example).backward()
    torch.testing.assert_close(weft.clip_grad_norm_(parallel, bound), wanted, rtol=1e-12, atol=0)
    for module in (model, parallel):
        torch.optim.SGD(module.parameters(), lr=1.0).step()
    found = parallel.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-12)


ORDERS = [1.0, 3, 0.5, math.inf, "inf"]


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3", "dp=2,spread"])
def test_norms_of_other_orders(plan: str) -> None:
    model, example = gpt(dropout=0.0)
    parallel = weft.parallelize(copy.deepcopy(model), example, plan, emulate=True, cache=None)
    for module in (model, parallel):
        call(module, example).backward()
    beside = [nn.Parameter(torch.zeros(3).double()) for _ in range(2)]
    for order in ORDERS:
        for one in beside:
            one.grad = torch.tensor([0.01, -0.02, 0.03]).double()
        how = {"norm_type": order, "error_if_nonfinite": True, "foreach": False}
        mine = torch.nn.utils.clip_grad_norm_([*model.parameters(), beside[0]], 0.01, **how)
        other = weft.clip_grad_norm_([*parallel.parameters(), beside[1]], 0.01, **how)
        torch.testing.assert_close(other, mine, rtol=1e-10, atol=0)
        wanted = weft.clip_grad_norm_(model, 1e9, order)
        torch.testing.assert_close(weft.clip_grad_norm_(parallel, 1e9, order), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_norms_that_are_not_finite(plan: str) -> None:
    model, example = gpt(dropout=0.0)
    parallel = weft.parallelize(model, example, plan, emulate=True, cache=None)
    call(parallel, example).backward()
    held = list(parallel.parameters())
    for one in held:
        one.grad.fill_(math.inf)
    for given in (parallel, held):
        with pytest.raises(RunError, match="norm of the gradients is inf: nothing was scaled"):
            weft.clip_grad_norm_(given, 1.0, error_if_nonfinite=True)
    assert all(weft.full_tensor(one.grad).isinf().all() for one in held)
    assert weft.clip_grad_norm_(parallel, 1.0).isinf()
    for wrong in (0, -1.0, math.nan, "two", None):
        with pytest.raises(RunError, match="norm_type="):
            weft.clip_grad_norm_(parallel, 1.0, norm_type=wrong)


def test_each_element_has_one_rank_that_answers_for_it() -> None:
    """Also where ranks hold different parts with elements in common."""
    whole, rows, columns = ((0, 4),), ((0, 2),), ((1, 3), (3, 4))
    ranks = ({"w": (rows, rows)}, {"w": (whole, rows)}, {"w": (rows, rows)}, {"w": (whole, columns)}, {})
    holdings, count = ShardOwners(ranks), torch.zeros(4, 4)
    for rank, held in enumerate(ranks):
        if "w" in held:
            at, mine = held["w"], holdings.answers_for("w", rank)
            index = [torch.cat([torch.arange(start, stop) for start, stop in intervals]) for intervals in at]
            count[index[0][:, None], index[1]] += torch.as_tensor(mine).float()
    assert count.eq(1).all()
    assert holdings.answers_for("w", 0) is True and holdings.answers_for("w", 2) is False


def test_what_another_rank_answers_for_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks hold everything, and answer for every other element."""

    def answers_for(self: ShardOwners, name: str, rank: int) -> Tensor:
        shape = size(self.ranks[rank][name])
        return (torch.arange(math.prod(shape)) % 2 == rank).view(shape)

    monkeypatch.setattr(ShardOwners, "answers_for", answers_for)
    model, example = gpt()
    parallel = weft.parallelize(copy.deepcopy(model), example, "dp=2", emulate=True, cache=None)
    with DrawMode(Stream(0, 0, 0)):
        call(model, example).backward()
    call(parallel, example).backward()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    torch.testing.assert_close(weft.clip_grad_norm_(parallel, 0.05), wanted, rtol=1e-12, atol=0)


def test_a_bound_of_nothing_is_refused_and_plain_modules_are_torchs() -> None:
    layer = torch.nn.Linear(2, 1)
    layer(torch.ones(2)).backward()
    assert weft.clip_grad_norm_(layer, 1e9).item() == pytest.approx(3**0.5)
    with pytest.raises(RunError, match="leaves nothing"):
        weft.clip_grad_norm_(layer, 0.0)


class Around(nn.Module):
    """A parallel body between layers that every rank has whole."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(4, 4).double(), body, nn.Linear(4, 4).double()
        # threads of ranks share torch's generator
        for one in (self.first.weight, self.first.bias, self.last.weight, self.last.bias):
            nn.init.constant_(one, 0.3).view(-1)[::2].data.mul_(-0.5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.body(self.first(x))).square().mean()
        return found


def body() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3"])
def test_one_norm_with_modules_around_it(plan: str, as_list: bool) -> None:
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def work(top: nn.Module, clip: Any) -> tuple[Any, ...]:
        top(x).backward()
        norm = clip(list(top.parameters()) if as_list else top, 0.01)
        return norm, top.first.weight.grad, top.last.bias.grad

    wanted = work(
        Around(body()),
        lambda top, bound: nn.utils.clip_grad_norm_(top.parameters() if isinstance(top, nn.Module) else top, bound),
    )
    parallel = weft.parallelize(body(), (x,), plan, emulate=True, cache=None)
    found = [work(Around(parallel), weft.clip_grad_norm_)]
    found += on_ranks(body(), (x,), plan, lambda rank: work(Around(rank), weft.clip_grad_norm_), outputs="any")
    for one in found:
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-14)

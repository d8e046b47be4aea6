"""What a loop does with forwards and backwards besides one after the other: left by an error, in another order, not at
all. The next step is as in eager, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.parts import parts
from tests.train.ranks import on_ranks
from weft.errors import WeftError
from weft.runtime.layout.index import take

PLANS = ["dp=1", "dp=2", "tp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,recompute=down", "dp=2,spread"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.up(x)))).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Mine(Exception):
    pass


class _Raises(torch.autograd.Function):
    """A node of the caller's whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Mine


def raise_mine(*given: Any) -> None:
    raise Mine


def step(module: Any, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    module(batch(seed)).backward()
    optimizer.step()


def in_backward(module: Any, optimizer: Any) -> None:
    """The caller's graph is older than that of the module: its node comes last."""
    for _ in range(2):
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        late = _Raises.apply(weight)
        with pytest.raises(Mine):
            (module(batch(5)) + late).backward()


def while_adding_up(module: Any, optimizer: Any) -> None:
    """What was there before an error is there after it."""
    optimizer.zero_grad()
    module(batch(5)).backward()
    kept = {name: one.grad.clone() for name, one in module.named_parameters()}
    in_backward(module, optimizer)
    if not isinstance(module, Net):
        torch.testing.assert_close(parts({name: one.grad for name, one in module.named_parameters()}), parts(kept))
    optimizer.zero_grad()


def between(module: Any, optimizer: Any) -> None:
    """Gradients are there, and the update is left out."""
    with pytest.raises(Mine):
        if isinstance(module, Net):
            optimizer.zero_grad()
            module(batch(5)).backward()
            raise_mine()
        else:
            module.train_step(batch(5), optimizer, prepare=raise_mine)


def discarded(module: Any, optimizer: Any) -> None:
    """Forwards whose losses nobody differentiates."""
    for seed in (5, 6):
        module(batch(seed))


def two_in_order(module: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    first, second = module(batch(5)), module(batch(6))
    first.backward()
    second.backward()
    optimizer.step()


def two_in_reverse(module: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    first, second = module(batch(5)), module(batch(6))
    second.backward()
    first.backward()
    optimizer.step()


def one_of_two(module: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    first, _ = module(batch(5)), module(batch(6))
    first.backward()
    optimizer.step()


def twice(module: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    loss = module(batch(5))
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


CALLS = [in_backward, while_adding_up, between, discarded, two_in_order, two_in_reverse, one_of_two, twice]


def trained(module: Any, call: Any) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)
    step(module, optimizer, 0)
    call(module, optimizer)
    for seed in (1, 2):
        step(module, optimizer, seed)
    return {name: one.detach().clone() for name, one in module.named_parameters()}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("plan", PLANS)
def test_what_follows_is_as_in_eager(plan: str, call: Any) -> None:
    expected = trained(net(), call)

    def body(module: Any) -> None:
        for name, found in trained(module, call).items():
            torch.testing.assert_close(parts(found), take(expected[name], module.stored[name]), rtol=1e-11, atol=1e-12)

    on_ranks(net(), (batch(),), plan, body)


def test_a_step_of_a_pipeline_that_was_left() -> None:
    """What its ranks have sent each other is lost."""

    def body(module: Any) -> str:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        module.train_step(batch(), optimizer)
        kept = {name: one.grad.clone() for name, one in module.named_parameters()}
        pipeline = module._flow.rank
        pipeline._tell_losses = raise_mine
        with pytest.raises(Mine):
            module.forward_backward(batch())
        del pipeline._tell_losses
        torch.testing.assert_close(parts({name: one.grad for name, one in module.named_parameters()}), parts(kept))
        with pytest.raises(WeftError, match="left by an error") as told:
            module.train_step(batch(), optimizer)
        return str(told.value)

    for told in on_ranks(net(), (batch(),), "pp=2,microbatches=2", body):
        assert "try:" in told


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_an_emulated_module_after_an_error_of_the_callers(plan: str) -> None:
    expected = trained(net(), in_backward)
    parallel: Any = weft.parallelize(net(), (batch(),), plan, emulate=True, cache=None)
    trained(parallel, in_backward)
    torch.testing.assert_close(dict(parallel.state_dict()), expected, rtol=1e-11, atol=1e-12)

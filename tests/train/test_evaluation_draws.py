"""Random numbers of evaluation: every call draws its own, the same under every plan, and training draws as without."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.runtime.random import Stream
from weft.verify.draw_mode import DrawMode

PLANS = ["dp=2", "tp=2", "dp=2,recompute", "dp=2,zero=3"]


class Noisy(nn.Module):
    """Returns a loss, a loss and a prediction, or a prediction."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns = returns
        self.up, self.drop, self.down = nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        found = self.down(self.drop(self.up(x))) + torch.randn(x.shape[0], 4, dtype=x.dtype)
        loss = found.square().mean()
        return {"loss": loss, "both": (loss, found), "found": found}[self.returns]


def made(returns: str) -> Noisy:
    torch.manual_seed(0)
    return Noisy(returns).double()


X = torch.linspace(-1, 1, 48, dtype=torch.float64).sin().view(8, 6)


def parallel(returns: str, plan: str) -> Any:
    return weft.parallelize(made(returns), X, plan, emulate=True, cache=None, seed=3)


def last(found: Any) -> Tensor:
    one: Tensor = found[-1] if isinstance(found, tuple) else found
    return one.detach().clone()


def monte_carlo(module: Any) -> list[Tensor]:
    module.eval()
    module.drop.train()
    with torch.no_grad():
        found = [last(module(X)) for _ in range(3)]
    module.train()
    return found


def trained(module: Any) -> Tensor:
    found = module(X)
    (found if isinstance(found, Tensor) else found[0]).sum().backward()
    return last(found)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("returns", ["loss", "both", "found"])
def test_every_call_draws_anew(returns: str, plan: str) -> None:
    module, eager = parallel(returns, plan), made(returns)
    found = [trained(module), *monte_carlo(module), trained(module), trained(module), *monte_carlo(module)]
    found += monte_carlo(module.eval())
    wanted = [(0, 0), (1, 1), (1, 2), (1, 3), (1, 0), (2, 0), (3, 1), (3, 2), (3, 3), (3, 4), (3, 5), (3, 6)]
    assert module.step == 3
    for one, (step, call) in zip(found, wanted, strict=True):
        with DrawMode(Stream(3, step, 0, call)):
            torch.testing.assert_close(one, last(eager(X)), rtol=1e-12, atol=1e-13)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(found, 2))


@pytest.mark.parametrize("returns", ["both", "found"])
def test_noise_in_evaluation(returns: str) -> None:
    """Also of a module that is wholly in evaluation, with gradients and without."""
    module, eager = parallel(returns, "dp=2").eval(), made(returns).eval()
    found = [last(module(X))]
    with torch.no_grad():
        found.append(last(module(X)))
    for call, one in enumerate(found, 1):
        with DrawMode(Stream(3, 0, 0, call)):
            torch.testing.assert_close(one, last(eager(X)), rtol=1e-12, atol=1e-13)


def test_micro_batches() -> None:
    module = weft.parallelize(made("both"), X, "pp=2,microbatches=2", emulate=True, cache=None, seed=3)
    eager = made("both")
    found = monte_carlo(module)
    module.train_step((X,), torch.optim.SGD(module.parameters(), lr=0.0))
    found += monte_carlo(module)
    for one, (step, call) in zip(found, [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)], strict=True):
        halves = []
        for micro, rows in enumerate(X.chunk(2)):
            with DrawMode(Stream(3, step, micro, call)):
                halves.append(last(eager(rows)))
        torch.testing.assert_close(one, torch.cat(halves), rtol=1e-12, atol=1e-13)


def test_goes_on_as_it_was_saved(tmp_path: Path) -> None:
    module = parallel("both", "dp=2")
    trained(module)
    weft.save(tmp_path / "saved", module)
    expected = monte_carlo(module)
    weft.load(tmp_path / "saved", module)
    others = parallel("both", "tp=2")
    weft.load(tmp_path / "saved", others)
    for mine in (monte_carlo(module), monte_carlo(others)):
        for one, wanted in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-12, atol=1e-13)

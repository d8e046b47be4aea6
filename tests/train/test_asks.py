"""What forward asks about a call besides values: the grad mode, `requires_grad`, memory formats. Another answer has a
program of its own; a pipeline, which cannot, says so with the line that asks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import RunError


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def factor(self, x: Tensor, y: Tensor) -> float:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x.reshape(x.shape[0], -1))
        return (self.b(torch.tanh(y)) * self.factor(x, y)).square().mean()


class GradMode(Base):
    def factor(self, x: Tensor, y: Tensor) -> float:
        return 2.0 if torch.is_grad_enabled() else 3.0


class OfMade(Base):
    def factor(self, x: Tensor, y: Tensor) -> float:
        return 2.0 if y.requires_grad else 3.0


class OfInput(Base):
    def factor(self, x: Tensor, y: Tensor) -> float:
        return 2.0 if x.requires_grad else 3.0


class Contiguous(Base):
    def factor(self, x: Tensor, y: Tensor) -> float:
        return 2.0 if x.is_contiguous() else 3.0


class Strides(Base):
    def factor(self, x: Tensor, y: Tensor) -> float:
        return float(x.stride(1))


class Inner(Base):
    """Answers that a region of forward gives, whatever the call's."""

    def factor(self, x: Tensor, y: Tensor) -> float:
        with torch.no_grad():
            off = torch.is_grad_enabled()
        return 2.0 if off else 3.0


def batch(*, seed: int = 0, last: bool = False, grad: bool = False) -> Tensor:
    x = torch.randn(4, 3, 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    # of size 1, a dim has any stride
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    return x.requires_grad_(grad)


def made(kind: type[Base], plan: str, **about: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    eager = kind().double()
    return eager, weft.parallelize(copy.deepcopy(eager), batch(**about), plan, cache=None, emulate=True)


def same_step(eager: nn.Module, parallel: Any, x: Tensor) -> None:
    losses = []
    for module in (eager, parallel):
        module.zero_grad()
        loss = module(x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad))
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0])
    held = dict(parallel.ranks[0].named_parameters())
    for name, one in eager.named_parameters():
        if held[name].shape == one.shape:
            torch.testing.assert_close(held[name].grad, one.grad)


@pytest.mark.parametrize("kind", [GradMode, OfMade, Inner])
@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "tp=2"])
def test_grad_mode(kind: type[Base], plan: str) -> None:
    eager, parallel = made(kind, plan)
    for mode in (True, False, True):
        eager.train(mode), parallel.train(mode)
        with torch.no_grad():
            torch.testing.assert_close(parallel(batch(seed=1)), eager(batch(seed=1)))
        same_step(eager, parallel, batch(seed=2))


@pytest.mark.parametrize("kind", [Contiguous, Strides])
@pytest.mark.parametrize("plan", ["dp=1", "dp=2"])
def test_memory_format(kind: type[Base], plan: str) -> None:
    eager, parallel = made(kind, plan)
    for last in (False, True, False):
        same_step(eager, parallel, batch(seed=1, last=last))
    eager.eval(), parallel.eval()
    for last in (True, False):
        same_step(eager, parallel, batch(seed=1, last=last))


def test_requires_grad_of_the_batch() -> None:
    eager, parallel = made(OfInput, "dp=2")
    for grad in (False, True):
        same_step(eager, parallel, batch(seed=1, grad=grad))


def test_a_pipeline_names_the_line() -> None:
    torch.manual_seed(0)
    parallel: Any = weft.parallelize(Contiguous().double(), batch(), "pp=2,microbatches=2", cache=None, emulate=True)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.train_step(batch(seed=1), optimizer)
    with pytest.raises(RunError, match=r"channels_last.*test_asks\.py:\d+") as caught:
        parallel.train_step(batch(seed=1, last=True), optimizer)
    assert "x of the batch" in str(caught.value)


def test_what_torch_asks_is_its_own_affair() -> None:
    """Torch's layers ask for the grad mode to choose a kernel."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    parallel: Any = weft.parallelize(copy.deepcopy(layer), x, "dp=1", cache=None, emulate=True)
    layer.eval(), parallel.eval()
    with torch.no_grad():
        torch.testing.assert_close(parallel(x), layer(x))
    assert not parallel.ranks[0]._flow.form.asks

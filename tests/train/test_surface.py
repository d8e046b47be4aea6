"""What a parallel module shows of the original besides parameters: submodules, modes, attributes. All are followed, or
refused at the line that changes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import RunError

PLANS = ["dp=1", "dp=2", "tp=2", "dp=2,zero=3"]


class Net(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
        self.alpha = 2.0
        self.register_buffer("beta", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.dropout(self.norm(self.a(x))))
        for layer in self.layers:
            x = x + layer(x)
        factor = 2.0 if self.training else 3.0
        return (x * self.alpha * self.scale * self.beta * factor).square().mean()


class Frozen(Net):
    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self


class Twice(Net):
    """A norm with two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(self.norm)


Change = Callable[[Any], object]


def both(plan: str, before: Change, changes: list[Change], kind: type[Net] = Net) -> None:
    """Train eager and parallel, with the same changes between steps, and compare losses and state."""
    torch.manual_seed(0)
    eager = kind().double()
    before(eager)
    parallel: Any = weft.parallelize(
        copy.deepcopy(eager), (torch.zeros(8, 4).double(),), plan, emulate=True, cache=None
    )
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (eager, parallel)]
    for change in changes:
        x = torch.randn(8, 4, dtype=torch.float64)
        for one in (eager, parallel):
            change(one)
        losses = []
        for module, optimizer in zip((eager, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(module(x))
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-12)
    for name, tensor in eager.state_dict().items():
        torch.testing.assert_close(parallel.state_dict()[name], tensor, rtol=0, atol=1e-11)


def nothing(module: Any) -> None:
    pass


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_a_module_with_two_paths_has_one_mode(plan: str) -> None:
    both(plan, nothing, [nothing, lambda one: one.other.eval(), lambda one: one.norm.train(), nothing], Twice)
    both(plan, nothing, [lambda one: one.norm.eval(), lambda one: one.other[0].train()], Twice)


@pytest.mark.parametrize("plan", PLANS)
def test_a_submodule_in_another_mode(plan: str) -> None:
    both(plan, nothing, [nothing, lambda m: m.norm.eval(), nothing, lambda m: m.norm.train(), lambda m: m.eval()])


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_what_was_frozen_before_is_not_after_train(plan: str) -> None:
    both(plan, lambda m: m.norm.eval(), [nothing, lambda m: m.eval(), lambda m: m.train(), nothing])


def test_a_model_that_was_in_evaluation_mode() -> None:
    both("dp=2", lambda m: m.eval(), [nothing, lambda m: m.train(), lambda m: m.eval()])


def test_a_train_of_its_own() -> None:
    both("dp=2", lambda m: m.train(), [nothing, lambda m: m.eval(), lambda m: m.train()], Frozen)


def test_buffers_can_be_set() -> None:
    both("dp=2", nothing, [nothing, lambda m: setattr(m, "beta", torch.full((4,), 3.0, dtype=torch.float64)), nothing])


@pytest.fixture(params=["dp=2", "pp=2,microbatches=2"])
def parallel(request: pytest.FixtureRequest) -> Any:
    return weft.parallelize(Net(), (torch.zeros(8, 4),), request.param, emulate=True, cache=None)


def test_attributes_that_no_program_reads_cannot_be_set(parallel: Any) -> None:
    for holder, name in ((parallel, "alpha"), (parallel, "scale"), (parallel.dropout, "p"), (parallel.norm, "eps")):
        with pytest.raises(RunError, match=rf"{name} is set, and programs do not read it") as caught:
            setattr(holder, name, 0.5)
        assert "test_surface.py" in str(caught.value) and "buffer" in str(caught.value)
    assert (parallel.alpha, parallel.dropout.p) == (2.0, 0.0), "they can be read"
    parallel.my_own = parallel.norm.my_own = 1


def test_submodules_without_parameters_are_there(parallel: Any) -> None:
    assert [name for name, _ in parallel.named_children() if name != "ranks"] == [
        name for name, _ in Net().named_children()
    ]
    assert len(parallel.layers) == 1 and parallel.layers[0] is parallel.get_submodule("layers.0")


def test_a_pipeline_trains_in_its_modes() -> None:
    parallel: Any = weft.parallelize(Net(), (torch.zeros(8, 4),), "pp=2,microbatches=2", emulate=True, cache=None)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.norm.eval()
    with pytest.raises(RunError, match="norm is in another mode"):
        parallel.train_step((torch.zeros(8, 4),), optimizer)
    parallel.norm.train()
    parallel.train_step((torch.randn(8, 4),), optimizer)
    parallel.eval()
    parallel(torch.randn(8, 4))
    parallel.train()
    parallel.train_step((torch.randn(8, 4),), optimizer)


def test_a_pipeline_is_evaluated_in_the_modes_that_are_set() -> None:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(8, 4, dtype=torch.float64)
    module: Any = weft.parallelize(copy.deepcopy(net), (x,), "pp=2,microbatches=1", emulate=True, cache=None)
    for change in (lambda m: m.eval(), lambda m: m.norm.train(), lambda m: m.norm.eval()):
        change(net), change(module)
        with torch.no_grad():
            torch.testing.assert_close(module(x), net(x), rtol=0, atol=1e-12)

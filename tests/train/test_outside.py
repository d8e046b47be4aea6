"""Parameters of a parallel module in the caller's own graph: what comes from there is complete, and nobody sums it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.parts import parts
from tests.train.ranks import on_ranks
from weft.errors import WeftError

PLANS = ("dp=1", "dp=2", "tp=2", "dp=2,zero=1", "dp=2,zero=3", "dp=2,recompute=norm")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.down(torch.tanh(self.norm(self.up(x))))).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> tuple[Tensor]:
    return (torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),)


def penalty(module: nn.Module) -> Tensor:
    return sum((0.1 * parameter.square().sum() for parameter in module.parameters()), torch.zeros(()))


def with_penalty(module: nn.Module, first: bool) -> dict[str, Tensor]:
    """Gradients of the loss and a penalty, whose graph is made before or after that of the loss, twice."""
    for _ in range(2):
        outside = penalty(module) if first else None
        loss = module(*batch())
        (loss + (penalty(module) if outside is None else outside)).backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_a_penalty_in_the_loss_counts_once(plan: str, first: bool) -> None:
    expected = with_penalty(net(), first)

    def body(module: Any) -> None:
        found = with_penalty(module, first)
        for name, gradient in found.items():
            part = expected[name][tuple(slice(*runs[0]) for runs in module.stored[name])]
            torch.testing.assert_close(parts(gradient), part, rtol=1e-13, atol=1e-14)
        assert found.keys() == {name for name in expected if name in module.stored}

    on_ranks(net(), batch(), plan, body)


def test_a_frozen_parameter_and_one_with_other_memory() -> None:
    """Leaves that stand for parameters follow them."""

    def steps(module: nn.Module) -> list[dict[str, Tensor]]:
        found = []
        for change in range(3):
            weight = module.get_parameter("norm.weight")
            weight.requires_grad_(change != 1)
            if change == 2:
                with torch.no_grad():
                    weight.mul_(2.0)
            module.zero_grad()
            module(*batch()).backward()
            found.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
        return found

    expected = steps(net())

    def body(module: Any) -> None:
        torch.testing.assert_close(steps(module), expected, rtol=1e-13, atol=1e-14)

    on_ranks(net(), batch(), "dp=2", body)


def some_of(module: nn.Module) -> None:
    torch.autograd.grad(module(*batch()), list(module.parameters()), allow_unused=True)


def into_some(module: nn.Module) -> None:
    module(*batch()).backward(inputs=[next(iter(module.parameters()))])


def twice(module: nn.Module) -> None:
    module(*batch()).backward(create_graph=True)


@pytest.mark.parametrize(
    ("call", "match"), [(some_of, "only some gradients"), (into_some, "only some gradients"), (twice, "create_graph")]
)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_gradients_that_would_not_be_complete_are_refused(call: Any, match: str, precision: str | None) -> None:
    parallel = weft.parallelize(net(), batch(), "dp=2", emulate=True, cache=None, precision=precision)
    with pytest.raises(WeftError, match=match):
        call(parallel)

"""Models that hold parameters in lists, dicts and stacks of stacks, through generated code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.parts import parts


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.full((4,), 1.0 + i)) for i in range(3))
        self.shifts = nn.ParameterDict({"first": torch.ones(4), "0": torch.zeros(4)})

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale + self.shifts["first"]
        return (x * x + self.shifts["0"]).sum()


@pytest.mark.parametrize("plan", ["dp=1", "dp=2"])
def test_parameters_in_lists_and_dicts(plan: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    eager = Listed()
    parallel = weft.parallelize(Listed(), (x,), plan, emulate=True, cache=None)
    ours, theirs = parallel(x), eager(x)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours, theirs)
    wanted = {name: parameter.grad for name, parameter in eager.named_parameters()}
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name.split(".", 2)[2]])


class Nested(nn.Module):
    """Stacks inside a stack: weights are brought before the region in which they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(self.part(), self.part()) for _ in range(4))

    @staticmethod
    def part() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.mark.parametrize("plan", ["dp=1,recompute=blocks.*", "dp=2,zero=1,recompute=blocks.*"])
def test_nested_stacks_are_recomputed(plan: str) -> None:
    torch.manual_seed(0)
    x, eager = torch.randn(2, 4), Nested()
    parallel = weft.parallelize(eager, (x,), plan, emulate=True, cache=None)
    ours, theirs = parallel(x), eager(x)
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    theirs.backward()
    wanted = {name: parameter.grad for name, parameter in eager.named_parameters()}
    for name, parameter in parallel.named_parameters():
        rank, whole = int(name.split(".")[1]), wanted[name.split(".", 2)[2]]
        assert whole is not None
        part = whole if parameter.shape == whole.shape else whole.chunk(2)[rank]
        torch.testing.assert_close(parts(parameter.grad), part)

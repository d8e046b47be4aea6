"""Parts of a model may be called what a parallel module or its program calls something of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import RunError

EXAMPLE = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Net(nn.Module):
    """A norm, a parameter and a buffer under the names given."""

    def __init__(self, norms: list[str], weights: list[str], counts: list[str]) -> None:
        super().__init__()
        self.norms, self.weights, self.counts = norms, weights, counts
        for name in norms:
            self.add_module(name, nn.BatchNorm1d(3, dtype=torch.float64))
        for name in weights:
            self.register_parameter(name, nn.Parameter(torch.rand(3, dtype=torch.float64)))
        for name in counts:
            self.register_buffer(name, torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.norms:
            x = x + self.get_submodule(name)(x)
        for name in self.weights:
            x = x * self.get_parameter(name)
        for name in self.counts:
            self.get_buffer(name).add_(1)
            x = x / self.get_buffer(name)
        return x.square().mean()


def own_names() -> list[str]:
    """Attributes of a parallel module and of its program that a model may have as well."""
    module = weft.parallelize(Net([], ["w"], []), EXAMPLE, "dp=1", emulate=False, cache=None)
    names = {*vars(module), *vars(module.program.modules[0])} - set(vars(nn.Module()))
    assert {"step", "tape", "masters", "_weight"} <= names
    return sorted(names)


def test_names_of_the_runtime() -> None:
    names = own_names()
    torch.manual_seed(0)
    eager = Net(*(names[kind::3] for kind in range(3)))
    module: Any = weft.parallelize(eager, EXAMPLE, "dp=2", emulate=True, cache=None)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (eager, module)]
    for _ in range(2):
        loss = module.train_step(EXAMPLE, optimizers[1])
        optimizers[0].zero_grad()
        expected = eager(EXAMPLE)
        expected.backward()
        optimizers[0].step()
        torch.testing.assert_close(loss, expected.detach())
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value)
    assert [rank.step for rank in module.ranks] == [2, 2]
    module.load_state_dict(eager.state_dict())
    # whichever of the three the model has under that name
    with pytest.raises((RunError, TypeError), match="step"):
        module.ranks[0].step = 7
    assert module.ranks[0].step == 2

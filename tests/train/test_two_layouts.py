"""A rank whose stages read one parameter in different layouts: one name for each, saved, loaded, trained."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.middle = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return found.square().mean()


def plan(graph: weft.Graph) -> weft.Plan:
    """Three stages on the same devices; the first cuts the weight, the last does not."""
    ops, made = [op.name for op in graph.ops], weft.Plan(graph, 2)
    middle, last = (next(at for at, op in enumerate(graph.ops) if op.path == name) for name in ("middle", "last"))
    for name, some in (("a", ops[:middle]), ("b", ops[middle:last]), ("c", ops[last:])):
        made = made.stage(name, some, [0, 1])
    return made.cut_batch(2).trans(made.match("first", op="linear"), weft.cut("n", 2))


def parallel(net: nn.Module) -> Any:
    return weft.parallelize(net, (batch(),), plan, emulate=True, cache=None)


def batch() -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Tied().double()


def test_one_name_for_each_parameter() -> None:
    made = parallel(net(0))
    for rank in made.ranks:
        named = list(rank.named_parameters())
        assert len({name for name, _ in named}) == len(named) == 4
        assert dict(named)["first.weight"].shape == (4, 8) and dict(named)["first.weight@2"].shape == (8, 8)
        state = {name: held.clone() for name, held in rank.state_dict().items()}
        assert set(state) == {"first.weight", "first.weight@2", "last.weight", "middle.weight", "middle.bias"}
        for one in rank.parameters():
            one.detach().zero_()
        rank.load_state_dict(state)
        torch.testing.assert_close(dict(rank.state_dict()), state)
        holder = nn.Sequential(rank)
        holder.load_state_dict(holder.state_dict())
    assert set(made.state_dict()) == set(net(0).state_dict())


def test_it_is_loaded_whole_and_trains() -> None:
    made, eager = parallel(net(1)), net(0)
    made.load_state_dict(eager.state_dict())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (eager, made)]
    for _ in range(3):
        optimizers[0].zero_grad()
        eager(batch()).backward()
        optimizers[0].step()
        made.train_step(batch(), optimizers[1])
    torch.testing.assert_close(dict(made.state_dict()), dict(eager.state_dict()), rtol=1e-10, atol=1e-11)
    copies = [dict(rank.named_parameters())["first.weight@2"] for rank in made.ranks]
    for copy in copies:
        torch.testing.assert_close(copy.detach(), eager.state_dict()["first.weight"], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("how", [plan, "pp=2,microbatches=1", "pp=2,virtual=2,microbatches=2"])
def test_frozen_for_a_while(how: Any) -> None:
    """Every copy is: none gets a gradient, nor is one moved by momentum."""
    eager = net(0)
    made: Any = weft.parallelize(deepcopy(eager), (batch(),), how, emulate=True, cache=None)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (eager, made)]
    for step in range(4):
        for one in (eager, *made.ranks):
            one.first.weight.requires_grad_(step != 2)
        optimizers[0].zero_grad()
        eager(batch()).backward()
        optimizers[0].step()
        made.train_step(batch(), optimizers[1])
        if step == 2:
            held = [one for rank in made.ranks for name, one in rank.named_parameters() if name.startswith("first")]
            assert all(one.grad is None for one in held)
        torch.testing.assert_close(dict(made.state_dict()), dict(eager.state_dict()), rtol=1e-10, atol=1e-11)

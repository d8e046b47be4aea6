"""Weights gathered ahead of their use, on processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes.conftest import Pools
from weft.runtime.layout.moves import all_gather, reduce_scatter
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.transport import Transport
from weft.runtime.program.module import ParallelModule, Part
from weft.runtime.weights import products as F

STORED = Part((6, 6), {0: "dp"}, dtype=torch.float64, use=[all_gather(0, "dp")], sync=None)
PARTS = {f"layers.{i}.weight": STORED for i in range(4)}
TWICE = (0, 1, 2, 1, 3)
"""One layer is used twice."""


class Tower(ParallelModule, grid={"dp": 2}, parameters=PARTS):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        for number in TWICE[int(skip) :]:
            stored = self.layers[number].weight
            weight = self.comm.use(stored, [all_gather(0, "dp")], sync=[reduce_scatter(0, "dp")])
            x = torch.tanh(F.linear(x, weight))
        share = x.square().sum()
        return self.finish(self.comm.all_reduce(share, over="dp"), share)


def train(transport: Transport, payload: Any = None) -> tuple[list[Tensor], int]:
    """Three steps, the second of which leaves out layers; the parts afterwards, and how many gathers were started."""
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(6, 6, generator=generator, dtype=torch.float64) for name in PARTS}
    mine = {name: whole.chunk(2)[transport.rank].clone() for name, whole in state.items()}
    module = Tower(transport, mine)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    started = 0
    if isinstance(transport, ProcessTransport):
        plain = transport.start_all_gather

        def counted(*args: Any) -> Any:
            nonlocal started
            started += 1
            return plain(*args)

        transport.start_all_gather = counted  # type: ignore[method-assign]
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 6) * (transport.rank + 1)
    for skip in (0, 0, 2, 0):
        optimizer.zero_grad()
        module(x, torch.tensor(skip)).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()], started


@pytest.mark.parametrize("kind", ["pools", "far_pools"])
def test_weights_on_their_way_early_are_the_same_to_the_bit(kind: str, request: pytest.FixtureRequest) -> None:
    pools: Pools = request.getfixturevalue(kind)
    wanted = run_ranks(2, train)
    found = pools(2).run(train)
    for (mine, started), (theirs, _) in zip(found, wanted, strict=True):
        assert started > 0
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)

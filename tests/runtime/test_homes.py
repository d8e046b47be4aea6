"""Kept weights and whole gradients among processes: what they bring is the emulator's, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.runtime.jobs.launch import Pool
from weft.runtime.layout.moves import all_gather, reduce_scatter
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.transport import Transport
from weft.runtime.program.module import ParallelModule, Part
from weft.runtime.weights import products as F

RANKS = 3
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "table": ((11, 8), 0),
    "wide": ((400, 8), 0),
    "across": ((400, 401), 1),
    "bias": ((2,), 0),
}
"""Shapes, and the dim that is cut: into uneven parts, and where it is short into some that are empty."""
KEEPS = ((), ("weight",), ("weight", "gradient"))
STEPS, MICROS = 3, 2


def net(keeps: tuple[str, ...]) -> type[ParallelModule]:
    parts = {
        name: Part(
            shape, {dim: "dp"}, torch.float64, use=[all_gather(dim, "dp", of=shape[dim])], sync=None, keeps=keeps
        )
        for name, (shape, dim) in SHAPES.items()
    }

    class Net(ParallelModule, grid={"dp": RANKS}, parameters=parts):
        def brought(self, name: str) -> Tensor:
            shape, dim = SHAPES[name]
            forward = [all_gather(dim, "dp", of=shape[dim])]
            found: Tensor = self.comm.use(self.model.at(name), forward, sync=[reduce_scatter(dim, "dp")])
            return found

        def forward(self, ids: Tensor) -> Tensor:
            table, wide, across = self.brought("table"), self.brought("wide"), self.brought("across")
            x = F.embedding(ids, table)
            x = F.linear(x, wide).tanh() @ across
            x = F.linear(x.tanh(), self.brought("across"))
            x = F.linear(F.linear(x.tanh(), wide.t()), table) * self.brought("bias").sum()
            share = x.square().mean()
            return self.finish(self.comm.all_reduce(share, over="dp"), share)

    return Net


def opened(transport: Transport, keeps: tuple[str, ...]) -> ParallelModule:
    draw = torch.Generator().manual_seed(0)
    wholes = {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, (shape, _) in SHAPES.items()}
    module = net(keeps)(transport)
    for name, parameter in module.named_parameters():
        index = module.stored[name]
        for dim, intervals in enumerate(index):
            start, stop = intervals[0] if intervals else (0, 0)
            wholes[name] = wholes[name].narrow(dim, start, stop - start)
        parameter.data.copy_(wholes[name])
    return module


def train(transport: Transport, keeps: tuple[str, ...], micros: int) -> dict[str, list[Tensor]]:
    """Gradients and weights of every step."""
    module = opened(transport, keeps)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: dict[str, list[Tensor]] = {name: [] for name in SHAPES}
    module.grad_sync.expect(micros)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micros):
            if micros > 1:
                module.hold_gradients(nullcontext())
            draw = torch.Generator().manual_seed(100 * step + 10 * micro + transport.rank)
            module(torch.randint(11, (4,), generator=draw)).backward()
        if micros > 1:
            module.complete_gradients()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            found[name].append(parameter.grad.clone())
        optimizer.step()
        for name, parameter in module.named_parameters():
            found[name].append(parameter.detach().clone())
    return found


def work(transport: ProcessTransport, payload: dict[str, Any]) -> dict[str, list[Tensor]]:
    return train(transport, payload["keeps"], payload["micros"])


@pytest.fixture(scope="module", params=[True, False], ids=["shared", "sent"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(RANKS, preload=("tests.runtime.test_homes",), by_pipe=request.param) as pool:
        yield pool


@pytest.mark.parametrize("micros", [1, MICROS])
@pytest.mark.parametrize("keeps", KEEPS)
def test_processes_are_the_emulator(pool: Pool, keeps: tuple[str, ...], micros: int) -> None:
    wanted = run_ranks(RANKS, lambda transport: train(transport, keeps, micros))
    found = pool.run("tests.runtime.test_homes:work", {"keeps": keeps, "micros": micros}, timeout=20)
    for mine, theirs in zip(found, wanted, strict=True):
        for name, tensors in theirs.items():
            for at, (one, other) in enumerate(zip(mine[name], tensors, strict=True)):
                assert torch.equal(one, other), f"{name} at {at}"

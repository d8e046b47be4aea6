"""Weights that are gathered while others are used: read from the other processes' memory, or sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.processes.conftest import Pools
from weft.runtime.layout.transfer import Index, Piece, Transfer
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.weights.prefetch import Prefetch
from weft.runtime.weights.unshard import Gather

SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "small": ((7,), 0),
    "rows": ((401, 300), 0),
    "columns": ((300, 401), 1),
    "bias": ((1200,), 0),
    "tall": ((1201, 200), 0),
}
"""Wholes, and the dim that they are stored in parts of: sizes that no number of ranks divides."""
RUNS = 4


def whole(name: str, run: int) -> Tensor:
    """What all ranks together store of a weight in a run."""
    shape, _ = SHAPES[name]
    made = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
    return made + run


def part(name: str, run: int, rank: int, num_ranks: int) -> Tensor:
    return whole(name, run).tensor_split(num_ranks, SHAPES[name][1])[rank].contiguous()


def gather_of(name: str, stored: Tensor, transport: ProcessTransport) -> Gather:
    shape, dim = SHAPES[name]
    ranks = tuple(range(transport.num_ranks))
    bounds = torch.arange(shape[dim]).tensor_split(transport.num_ranks)

    def index(rank: int) -> Index:
        here = (int(bounds[rank][0]), int(bounds[rank][-1]) + 1)
        return tuple((here if at == dim else (0, length),) for at, length in enumerate(shape))

    everything = tuple(((0, length),) for length in stored.shape)
    sends = tuple(Piece(rank, 0, everything) for rank in ranks)
    receives = tuple(Piece(rank, 0, index(rank)) for rank in ranks)
    return Gather(name, stored, (Transfer("all_gather", ranks, sends, receives, (shape,)),), transport)


def runs(transport: ProcessTransport, payload: dict[str, Any]) -> list[list[Tensor]]:
    """Runs that ask for weights in one order, then in another; between them parts change, or get other memory."""
    rank, num_ranks = transport.rank, transport.num_ranks
    stored = {name: nn.Parameter(part(name, 0, rank, num_ranks)) for name in SHAPES}
    gathers = {name: gather_of(name, one, transport) for name, one in stored.items()}
    prefetch = Prefetch()
    transport.lay(list(stored.values()), tuple(range(num_ranks)))
    found: list[list[Tensor]] = []
    for run in range(RUNS):
        for name, one in stored.items():
            new = part(name, run, rank, num_ranks)
            if run == payload["replaced"]:
                one.data = new
            else:
                with torch.no_grad():
                    one.copy_(new)
        prefetch.begin(list(gathers.values()))
        names = list(SHAPES) if run != payload["reversed"] else [*reversed(SHAPES), "rows"]
        come = {name: prefetch.get(gathers[name]).clone() for name in names}
        found.append([come[name] for name in SHAPES])
    prefetch.begin(())
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize(("replaced", "other_order"), [(-1, -1), (2, -1), (-1, 2)])
def test_wholes(pools: Pools, far_pools: Pools, num_ranks: int, near: bool, replaced: int, other_order: int) -> None:
    pool = (pools if near else far_pools)(num_ranks)
    payload = {"replaced": replaced, "reversed": other_order}
    for of_rank in pool.run("tests.processes.test_fetched:runs", payload):
        for run, wholes in enumerate(of_rank):
            assert all(map(torch.equal, wholes, (whole(name, run) for name in SHAPES))), f"run {run}"

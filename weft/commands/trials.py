"""Trials: what `weft doctor` runs on the processes of a machine, each collective by itself.

In: the transport of a rank, and a name. Out: what the collective gives, and the seconds that it took, the median of a
few. What is tried is the transport that programs use. Ranks contribute small whole numbers, so that every order of a
sum gives the same bits: on emulated ranks the same function says what is right.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn

from weft.runtime.layout.sharding import Sharding
from weft.runtime.links.transport import Transport

TRIALS = ("processes", "barrier", "all-reduce", "all-gather", "reduce-scatter", "point to point")
"""In the order in which they are run; the first is to start, and to communicate nothing."""
SIZE = 1 << 18
"""Elements of a rank's tensor: 1 MiB."""
REPEATS = 5


def trial(transport: Transport, name: str) -> tuple[Tensor, float]:
    """One collective over all ranks."""
    mine = torch.arange(SIZE, device=transport.device).remainder(1000).add(transport.rank).float()
    times = []
    for turn in range(REPEATS + 1):
        begin = time.perf_counter()
        found = _call(transport, name, mine, turn)
        # waits for the device
        found[0].item()
        times.append(time.perf_counter() - begin)
    # the first call pays for memory and connections
    return found, statistics.median(times[1:])


def _call(transport: Transport, name: str, mine: Tensor, turn: int) -> Tensor:
    count = transport.num_ranks
    group, length = tuple(range(count)), SIZE // count
    match name:
        case "barrier":
            transport.barrier(group)
        case "all-reduce":
            return transport.all_reduce(mine, group)
        case "all-gather":
            return torch.cat(transport.all_gather(mine, group))
        case "reduce-scatter":
            parts = tuple((((length * at, length * (at + 1)),),) for at in group)
            sharding = Sharding([(length * count,)], [parts], [(length,)], mine.dtype)
            return transport.start_reduce_scatter([mine[: length * count]], sharding, group).wait()[0]
        case "point to point":
            # to the next rank, from the one before; a tag is used once: ranks are not at the same turn
            transport.meet([(rank, (rank + 1) % count) for rank in group])
            transport.post((transport.rank + 1) % count, f"{name} {turn}", [mine])
            return transport.take((transport.rank - 1) % count, f"{name} {turn}", [((SIZE,), mine.dtype)])[0]
    return mine


class Tiny(nn.Sequential):
    """What `weft doctor` verifies: layers, and a loss."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x)
        return found.square().mean()

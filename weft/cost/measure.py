"""Measuring links: what collectives cost between processes of this machine.

In: a backend and a number of processes. Out: the Links of that backend here, for `lower(plan, links=...)`. Each
collective is timed for a few bytes and for a large buffer: the first gives the latency, the difference of the two the
rate. Times are medians, of the slowest rank. The processes meet through a file and open no port but the backend's own.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from weft.cost.links import KINDS, Links
from weft.errors import RunError, WeftError

BACKENDS = ("gloo",)
"""What can be measured without an accelerator."""
SMALL, LARGE = 1 << 10, 16 << 20
"""Bytes of a buffer."""
REPEATS = {SMALL: 20, LARGE: 5}
PEER_SHARE = 0.2
"""Part of the latency that grows with the group. Two processes cannot tell: the share is that of the built-in table."""

Times = Mapping[str, Mapping[int, float]]
"""Seconds by kind and bytes."""


def measure_links(backend: str = "gloo", *, processes: int = 2) -> Links:
    """Start processes on this machine, time every kind of collective, and fit the table."""
    if backend not in BACKENDS:
        raise WeftError(f"the links of {backend!r} cannot be measured here", remedy=f"measure {', '.join(BACKENDS)}")
    if processes < 2:
        raise WeftError(f"{processes} process has nobody to talk to", remedy="measure with at least 2 processes")
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_time_rank, args=(backend, processes, folder), nprocs=processes)
        except ProcessException as error:
            raise RunError(f"a process failed while links were measured: {error}") from error
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
    slowest = {kind: {size: max(r[kind][str(size)] for r in ranks) for size in REPEATS} for kind in KINDS}
    return fit(backend, slowest, processes)


def fit(name: str, times: Times, processes: int) -> Links:
    """The table that gives these times back: latency from the small buffers, rates from the difference."""
    base = statistics.median(times[kind][SMALL] for kind in KINDS if kind not in ("local", "exchange"))
    share = (processes - 1) / processes
    factors = {"all_reduce": 2 * share, "broadcast": 1.0, "exchange": 1.0, "local": 1.0}
    rates = {
        kind: max(times[kind][LARGE] - times[kind][SMALL], 0.0) / (factors.get(kind, share) * (LARGE - SMALL))
        for kind in KINDS
    }
    return Links(
        name=name,
        latency=base * (1 - PEER_SHARE),
        peer_latency=base * PEER_SHARE / (processes - 1),
        **rates,
    )


def _time_rank(rank: int, backend: str, processes: int, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = (Path(folder) / "meeting").as_uri()
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=processes)
    times = {
        kind: {size: _median(_call(kind, size, rank, processes), repeats) for size, repeats in REPEATS.items()}
        for kind in KINDS
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def _median(call: Callable[[], object], repeats: int) -> float:
    call()
    found = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _call(kind: str, size: int, rank: int, processes: int) -> Callable[[], object]:
    """One collective over all processes whose buffer, as `Links` counts it, has `size` bytes."""
    each = size // 4 // processes
    buffer, part = torch.zeros(each * processes), torch.zeros(each)
    peer = (rank + 1) % processes, (rank - 1) % processes

    def exchange() -> None:
        sends = dist.P2POp(dist.isend, buffer, peer[0])
        receives = dist.P2POp(dist.irecv, arrived, peer[1])
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    arrived = torch.zeros_like(buffer)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(buffer),
        "all_gather": lambda: dist.all_gather(list(arrived.chunk(processes)), part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, list(buffer.chunk(processes))),
        "all_to_all": lambda: dist.all_to_all_single(arrived, buffer),
        "broadcast": lambda: dist.broadcast(buffer, 0),
        "exchange": exchange,
        "local": buffer.clone,
    }
    return calls[kind]

"""Measuring links: what the runtime's collectives cost between processes of this machine.

In: a backend and a number of processes. Out: the Links of that backend here, for `lower(plan, links=...)`. Each
collective is timed at several sizes: these are its curve; the smallest gives the latency of groups of other sizes, the
difference to the largest their rate. What is timed is what programs call: a Transfer of each kind carried out, and the
transport's own calls for buckets, not the backend's. Times are medians of the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from weft.cost.links import BUCKET, BUCKETS, KINDS, Links
from weft.errors import RunError, WeftError
from weft.runtime.jobs.launch import Pool
from weft.runtime.layout.cuts import Place, whole
from weft.runtime.layout.execute import execute
from weft.runtime.layout.sharding import Sharding
from weft.runtime.layout.transfer import Piece, Transfer
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.transport import CollectiveMismatch, RankFailed

BACKENDS = ("gloo",)
"""What can be measured without an accelerator."""
SMALL, LARGE = 1 << 10, 16 << 20
"""Bytes of a buffer."""
REPEATS = {SMALL: 20, 1 << 14: 20, 1 << 16: 20, 1 << 18: 16, 1 << 20: 12, 1 << 22: 8, LARGE: 5}
"""How often each is timed."""
PEER_SHARE = 0.2
"""Part of the latency that grows with the group. Two processes cannot tell: the share is that of the built-in table."""

Times = Mapping[str, Mapping[int, float]]
"""Seconds by kind and bytes."""


def measure_links(
    backend: str = "gloo", *, processes: int = 2, done: Callable[[int, int], None] = lambda count, total: None
) -> Links:
    """Start processes on this machine, time every kind of collective, and fit the table.

    Args:
        done: is told how many measurements of how many are made.
    """
    if backend not in BACKENDS:
        raise WeftError(f"the links of {backend!r} cannot be measured here", remedy=f"measure {', '.join(BACKENDS)}")
    if processes < 2:
        raise WeftError(f"{processes} process has nobody to talk to", remedy="measure with at least 2 processes")
    work = [(kind, size) for kind in (*KINDS, *BUCKETS) for size in REPEATS]
    times: dict[str, dict[int, float]] = {kind: {} for kind in (*KINDS, *BUCKETS)}
    with Pool(processes, backend=backend) as pool:
        for count, (kind, size) in enumerate(work):
            done(count, len(work))
            try:
                found = pool.run(time_rank, (kind, size))
            except (RankFailed, CollectiveMismatch) as error:
                raise RunError(f"a process failed while links were measured: {error}") from error
            times[kind][size] = max(found)
    done(len(work), len(work))
    return fit(backend, times, processes)


def fit(name: str, times: Times, processes: int) -> Links:
    """The table that gives these times back: latency from the small buffers, rates from the difference."""
    base = statistics.median(times[kind][SMALL] for kind in KINDS if kind not in ("local", "exchange"))
    rates = {
        name: max(times[name][LARGE] - times[name][SMALL], 0.0) / (kind.factor(processes) * (LARGE - SMALL))
        for name, kind in KINDS.items()
    }
    curves = {kind: tuple(sorted((float(size), found) for size, found in each.items())) for kind, each in times.items()}
    return Links(name, base * (1 - PEER_SHARE), base * PEER_SHARE / (processes - 1), rates, processes, curves)


def time_rank(transport: ProcessTransport, asked: tuple[str, int]) -> float:
    """The median time of one collective on this rank."""
    kind, size = asked
    everyone = tuple(range(transport.num_ranks))
    transport.check = False
    call = _call(kind, size, transport)
    found = []
    for _ in range(REPEATS[size] + 1):
        transport.barrier(everyone)
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    # the first call pays for memory and connections
    return statistics.median(found[1:])


def _call(kind: str, size: int, transport: ProcessTransport) -> Callable[[], object]:
    """One collective over all processes whose buffer, as `Links` counts it, has `size` bytes."""
    if kind in BUCKETS:
        return _bucket_call(kind.removeprefix(BUCKET), size // 4, transport)
    rank, processes = transport.rank, transport.num_ranks
    everyone, place = tuple(range(processes)), Place((("all", processes),), rank)
    each = size // 4 // processes
    move, buffer = KINDS[kind].example, torch.zeros(processes, each)
    if kind == "local":
        return buffer.clone
    if move is None:
        takers = [peer for peer in everyone if peer] if kind == "broadcast" else [(rank + 1) % processes]
        givers = [0] if kind == "broadcast" else [(rank - 1) % processes]
        everything = whole(tuple(buffer.shape))
        sends = [Piece(peer, 0, everything) for peer in takers] if kind == "exchange" or not rank else []
        receives = [Piece(peer, 0, everything) for peer in givers if peer != rank]
        shapes = (tuple(buffer.shape),) if receives else ()
        transfer = Transfer(kind, everyone, tuple(sends), tuple(receives), shapes)
        return lambda: execute(transfer, [buffer], transport, dtype=buffer.dtype)
    # what is only joined begins with parts
    tensor = buffer[:1] if move.joined_dim >= 0 > move.cut_dim else buffer
    carried = move.transfer(tuple(tensor.shape), place)
    return lambda: execute(carried, [tensor], transport, dtype=tensor.dtype)


def _bucket_call(kind: str, numel: int, transport: ProcessTransport) -> Callable[[], object]:
    """The same of a bucket, which lies where programs have theirs."""
    everyone, processes = tuple(range(transport.num_ranks)), transport.num_ranks
    numel = numel // processes * processes
    share = numel // processes
    full = transport.buffer(numel, torch.float32, everyone).zero_()
    parts = tuple(((rank * share, (rank + 1) * share),) for rank in everyone)
    sharding = Sharding([(numel,)], [tuple((one,) for one in parts)], [(share,)], torch.float32)
    shard = torch.zeros(share)
    match kind:
        case "all_reduce":
            return lambda: transport.start_all_reduce([full], everyone).wait()
        case "all_gather":
            return lambda: transport.start_all_gather([shard], sharding, everyone).wait()
    return lambda: transport.start_reduce_scatter([full], sharding, everyone).wait()

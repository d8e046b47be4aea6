"""Measuring links: what the runtime's collectives cost between processes of this machine.

In: a backend and a number of processes. Out: the Links of that backend here, for `lower(plan, links=...)`. Each
collective is timed for a few bytes and for a large buffer; the first gives the latency, the difference of both the
rate. What is timed is what Programs send, a Transfer of each kind carried out, not the backend's own calls. Times are
medians of the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from weft.cost.links import KINDS, Links
from weft.errors import RunError, WeftError
from weft.runtime.jobs.launch import Pool
from weft.runtime.layout.cuts import Place, whole
from weft.runtime.layout.execute import execute
from weft.runtime.layout.transfer import Piece, Transfer
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.transport import CollectiveMismatch, RankFailed

BACKENDS = ("gloo",)
"""What can be measured without an accelerator."""
SMALL, LARGE = 1 << 10, 16 << 20
"""Bytes of a buffer."""
REPEATS = {SMALL: 20, LARGE: 5}
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
    work = [(kind, size) for kind in KINDS for size in REPEATS]
    times: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
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
    return Links(name, base * (1 - PEER_SHARE), base * PEER_SHARE / (processes - 1), rates)


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

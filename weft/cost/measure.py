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
from weft.runtime.layout.moves import Move, all_gather, all_reduce, all_to_all, reduce_scatter
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
    buffer, part = torch.zeros(each * processes), torch.zeros(each)
    if kind == "local":
        return buffer.clone
    if kind in ("broadcast", "exchange"):
        takers = [peer for peer in everyone if peer] if kind == "broadcast" else [(rank + 1) % processes]
        givers = [0] if kind == "broadcast" else [(rank - 1) % processes]
        everything = whole(tuple(buffer.shape))
        sends = [Piece(peer, 0, everything) for peer in takers] if kind == "exchange" or not rank else []
        receives = [Piece(peer, 0, everything) for peer in givers if peer != rank]
        shapes = ((len(buffer),),) if receives else ()
        transfer = Transfer(kind, everyone, tuple(sends), tuple(receives), shapes)
        return lambda: execute(transfer, [buffer], transport, dtype=buffer.dtype)
    square = buffer.view(processes, each)
    moves: dict[str, tuple[Move, torch.Tensor]] = {
        "all_reduce": (all_reduce("all"), buffer),
        "all_gather": (all_gather(0, "all"), part),
        "reduce_scatter": (reduce_scatter(0, "all"), buffer),
        "all_to_all": (all_to_all(0, "all", joined=1), square),
    }
    move, tensor = moves[kind]
    carried = move.transfer(tuple(tensor.shape), place)
    return lambda: execute(carried, [tensor], transport, dtype=tensor.dtype)

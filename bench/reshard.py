"""Each collective of the runtime against the backend's own call and the best composition known, between processes.

    python bench/reshard.py [--ranks 2 4] [--sizes 4096 ... ] [--repeats 9] [-o bench/results/reshard.json]

Times are medians over repeats in which the candidates take turns, each time of the slowest rank, in seconds. `bytes` is
the local tensor (all_reduce, reduce_scatter, all_to_all) or the gathered result (all_gather). Candidates:

    own    gloo's own call            composed  torch.distributed's all_to_all_single and a local sum
    pairs  isend and irecv per peer   weft      what the runtime does
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from bench.machine import machine
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.processes import ProcessTransport

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Calls = dict[str, Callable[[], object]]


def timed(transport: ProcessTransport, job: dict[str, Any]) -> dict[str, list[float]]:
    """The times of each candidate on this rank."""
    if not dist.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = job["interface"]
        dist.init_process_group("gloo", init_method=job["meeting"], rank=transport.rank, world_size=transport.num_ranks)
    transport.check = False
    calls = candidates(job["kind"], job["bytes"] // 4, transport)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(job["repeats"] + 1):
        for name, call in calls.items():
            # by the group that comes next: its threads are awake then, whoever it belongs to
            if name == "weft":
                transport.barrier(tuple(range(transport.num_ranks)))
            else:
                dist.barrier()
            start = time.perf_counter()
            call()
            if repeat:
                found[name].append(time.perf_counter() - start)
    return found


def candidates(kind: str, numel: int, transport: ProcessTransport) -> Calls:
    """The ways to do one collective on that many float32 numbers."""
    n, rank = transport.num_ranks, transport.rank
    group = tuple(range(n))
    whole, part = torch.ones(numel), torch.ones(numel // n)
    others = [peer for peer in group if peer != rank]
    cut = dict(zip(group, whole.chunk(n), strict=True))
    want = [(tuple(part.shape), part.dtype)]

    def pairs(send: Callable[[int], Tensor]) -> list[Tensor]:
        into = list(torch.empty(numel).chunk(n))
        works = [dist.irecv(into[peer], peer) for peer in others] + [dist.isend(send(peer), peer) for peer in others]
        for work in works:
            work.wait()
        into[rank].copy_(send(rank))
        return into

    def to_all(mine: Tensor) -> list[Tensor]:
        return pairs(lambda peer: mine)

    def exchanged(sent: Tensor) -> Tensor:
        made = torch.empty(numel)
        dist.all_to_all_single(made, sent)
        return made

    def added(parts: Tensor | list[Tensor]) -> Tensor:
        total = parts[0].clone()
        for one in parts[1:]:
            total += one
        return total

    return {
        "all_reduce": {
            "own": lambda: dist.all_reduce(whole.clone()),
            "composed": lambda: exchanged(added(exchanged(whole).view(n, -1)).repeat(n)),
            "pairs": lambda: to_all(added(pairs(lambda peer: cut[peer]))),
            "weft": lambda: transport.all_reduce(whole, group),
        },
        "all_gather": {
            "own": lambda: dist.all_gather_single(torch.empty(numel), part),
            "composed": lambda: exchanged(part.repeat(n)),
            "pairs": lambda: pairs(lambda peer: part),
            "weft": lambda: transport.all_gather(part, group),
        },
        "reduce_scatter": {
            "own": lambda: dist.reduce_scatter_single(torch.empty(numel // n), whole),
            "composed": lambda: added(exchanged(whole).view(n, -1)),
            "pairs": lambda: added(pairs(lambda peer: cut[peer])),
            "weft": lambda: transport.reduce_scatter(list(cut.values()), group),
        },
        "all_to_all": {
            "own": lambda: exchanged(whole),
            "pairs": lambda: pairs(lambda peer: cut[peer]),
            "weft": lambda: transport.all_to_all({p: [cut[p]] for p in others}, dict.fromkeys(others, want), group),
        },
    }[kind]


def measure(ranks: list[int], sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each number of ranks, kind and size."""
    rows = []
    for num_ranks in ranks:
        work = [(kind, size) for kind in KINDS for size in sizes]
        with Pool(num_ranks) as pool, tempfile.TemporaryDirectory() as folder:
            meeting = (Path(folder) / "meeting").as_uri()
            for kind, size in track(work, f"{num_ranks} ranks", console=Console(stderr=True)):
                count = repeats * (5 if size <= 64 << 10 else 1)
                job = {"kind": kind, "bytes": size, "repeats": count, "meeting": meeting, "interface": loopback()}
                found = pool.run("bench.reshard:timed", job)
                slowest = {
                    name: [max(times) for times in zip(*(one[name] for one in found), strict=True)] for name in found[0]
                }
                seconds = {name: statistics.median(times) for name, times in slowest.items()}
                rows.append({"ranks": num_ranks, "kind": kind, "bytes": size, "seconds": seconds, **ratios(seconds)})
    return rows


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    best = min(value for name, value in seconds.items() if name != "weft")
    return {"to_own": seconds["weft"] / seconds["own"], "to_best": seconds["weft"] / best}


def loopback() -> str:
    return "lo0" if platform.system() == "Darwin" else "lo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("-o", "--output", default=str(Path(__file__).parent / "results" / "reshard.json"))
    options = parser.parse_args()
    before = machine(backend="gloo")
    rows = measure(options.ranks, options.sizes, options.repeats)
    Path(options.output).write_text(json.dumps({"machine": before, "rows": rows}, indent=1) + "\n")
    table = Table(
        "ranks", "collective", "KB", "own ms", "composed ms", "pairs ms", "weft ms", "to own", "to best", box=None
    )
    for row in rows:
        times = [row["seconds"].get(name) for name in ("own", "composed", "pairs", "weft")]
        cells = [f"{1e3 * value:.2f}" if value is not None else "" for value in times]
        numbers = (str(row["ranks"]), row["kind"], str(row["bytes"] >> 10))
        table.add_row(*numbers, *cells, f"{row['to_own']:.2f}", f"{row['to_best']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()

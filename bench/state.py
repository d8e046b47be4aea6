"""Step time: state stored in parts, ours against torch's (`bench/sharded.py`).

    python bench/state.py [--repeats 15] [--ranks 2 4] [--out bench/results/state.json]

Both sides take a step in turn, in the same processes, on the same batch and from the same weights; medians and their
ratio are told, below 1 where Weft is faster. Nothing is judged here, except that losses stay together.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.overhead import (
    alternate,
    example,
    model,
    tell,
)
from bench.sharded import PEERS, compare_all, ours, theirs, torch_group
from weft.compile import compile_program
from weft.runtime.launch import Pool
from weft.runtime.processes import ProcessTransport

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "state.json"


def both_sides(transport: ProcessTransport, payload: dict[str, Any]) -> dict[str, Any]:
    """One process: both sides in turn."""
    with torch_group(transport, payload["meeting"]):
        batch = example(payload["batch"])
        mine = ours(transport, payload["files"], batch)
        other = theirs(payload["name"], batch, hollow=False)
        return alternate(mine, other, payload["repeats"], dist.barrier)


def compare(name: str, ranks: int, batch: int, repeats: int) -> dict[str, Any]:
    """Both sides of a stage on so many ranks."""
    files = compile_program(model(), example(batch), f"dp={ranks},{name}").files
    with tempfile.TemporaryDirectory() as folder, Pool(ranks, preload=("bench.state",)) as pool:
        payload = {"files": files, "name": name, "batch": batch, "repeats": repeats, "meeting": f"{folder}/meeting"}
        told = pool.run("bench.state:both_sides", payload, timeout=300)
    found = {key: max(rank[key] for rank in told) for key in ("ours", "theirs")}
    found["ratio"] = found["ours"] / found["theirs"]
    for key in ("ratio_of_minima", "ratio_of_cpu_time"):
        found[key] = statistics.fmean(rank[key] for rank in told)
    return found


def say(name: str, ranks: int, found: dict[str, Any]) -> None:
    tell(f"{name} on {ranks} ranks, theirs {PEERS[name]}", found)


if __name__ == "__main__":
    compare_all(__doc__, RESULT, 15, compare, say)

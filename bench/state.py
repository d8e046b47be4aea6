"""Step time: state stored in parts, ours against torch's (`bench/sharded.py`).

    python bench/state.py [--repeats 15] [--ranks 2 4] [--out bench/results/state.json]

Both sides take a step in turn, in the same processes, on the same batch and from the same weights; medians and their
ratio are told, below 1 where Weft is faster. Nothing is judged here, except that losses stay together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.machine import machine
from bench.overhead import (
    BATCH,
    GPT,
    HEADS,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    alternate,
    example,
    model,
    tell,
)
from bench.sharded import PEERS, ours, theirs, torch_group
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--stages", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "length": LENGTH, "vocabulary": VOCABULARY}
    found: dict[str, Any] = {
        "machine": machine(),
        "model": size,
        "parameters": sum(p.numel() for p in GPT().parameters()),
        "batch": options.batch,
    }
    for ranks in options.ranks:
        for name in options.stages:
            result = found[f"{name} on {ranks}"] = compare(name, ranks, options.batch, options.repeats)
            tell(f"{name} on {ranks} ranks, theirs {PEERS[name]}", result)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

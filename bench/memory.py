"""Peak resident memory of a rank: state stored in parts, ours against torch's (`bench/sharded.py`).

    python bench/memory.py [--repeats 3] [--ranks 2 4] [--out bench/results/memory.json]

Each side runs in processes of its own, in turn. What is told is the most that a process had resident while it made its
module and trained five steps, above what it had before with everything imported; of the ranks the largest, of the
repeats the median, and the ratio of ours to theirs, below 1 where Weft takes less. Memory that processes share counts
in each of them. Weft's processes let the C library give memory back (`weft/runtime/jobs/heap.py`), torch's own do not:
the peer runs as it comes, and once more with that setting (`theirs_giving_back`). Nothing is judged here.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.gpt import example, model
from bench.overhead import WARM_UP
from bench.sharded import PEERS, compare_all, ours, theirs
from bench.turns import torch_group
from weft.compile import compile_program
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.processes import ProcessTransport

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "memory.json"
MEBI = 1 << 20
SIDES = {"ours": True, "theirs": False, "theirs_giving_back": True}
"""Whether memory is given back."""


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def one_side(transport: ProcessTransport, payload: dict[str, Any]) -> dict[str, int]:
    """One process of one side: its peak above what it had."""
    with torch_group(transport, payload["meeting"]):
        batch = example(payload["batch"])
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        if payload["side"] == "ours":
            step = ours(transport, payload["files"], batch)
        else:
            step = theirs(payload["name"], batch, hollow=True)
        made = resident("VmHWM") - before
        for _ in range(WARM_UP + 2):
            step()
        return {"peak": resident("VmHWM") - before, "made": made, "before": before}


def compare(name: str, ranks: int, batch: int, repeats: int) -> dict[str, Any]:
    """Both sides of a stage on so many ranks."""
    files = compile_program(model(), example(batch), f"dp={ranks},{name}").files
    found: dict[str, list[int]] = {side: [] for side in SIDES}
    more: dict[str, Any] = {}
    for _ in range(repeats):
        for side, gives_back in SIDES.items():
            pool = Pool(ranks, preload=("bench.memory",), gives_back=gives_back)
            with tempfile.TemporaryDirectory() as folder, pool:
                payload = {"files": files, "name": name, "side": side, "batch": batch}
                told = pool.run("bench.memory:one_side", {**payload, "meeting": f"{folder}/meeting"}, timeout=300)
            found[side].append(max(rank["peak"] for rank in told))
            more[f"{side}_made"] = max(rank["made"] for rank in told)
            more[f"{side}_before"] = max(rank["before"] for rank in told)
    medians = {side: statistics.median(values) for side, values in found.items()}
    ratios = {f"ratio{side.removeprefix('theirs')}": medians["ours"] / medians[side] for side in list(SIDES)[1:]}
    return {**medians, **ratios, "all": found, **more}


def say(name: str, ranks: int, found: dict[str, Any]) -> None:
    mine, other, giving = (found[side] / MEBI for side in SIDES)
    told = f"ours {mine:.0f} MiB, {PEERS[name]} {other:.0f} MiB, ratio {found['ratio']:.3f}"
    also = f"giving memory back {giving:.0f} MiB, ratio {found['ratio_giving_back']:.3f}"
    print(f"{name} on {ranks} ranks: {told} ({also})", flush=True)


if __name__ == "__main__":
    compare_all(__doc__, RESULT, 3, compare, say)

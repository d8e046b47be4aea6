"""What a pipeline costs: `pp=2` against `torch.distributed.pipelining`, both on two processes of this machine.

    python bench/pipeline.py [--repeats 9] [--out bench/results/pipeline.json]

The GPT of gpt.py, cut before its fifth block; for torch by hand into two modules with the loss outside, for Weft
by `stages=`. Both sides train with fused AdamW, one thread per process, and take a step in turn, in the same run, on
the same batch; a step lasts until the slower rank has ended. Medians and their ratio are told, below 1 where Weft is
faster. Peak memory is that of processes of their own that run one side only, and once more without what such a process
takes before it has a model. Nothing is judged here but that losses stay together.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F  # noqa: N812

from bench.gpt import GPT, SIZES, example, model
from bench.machine import machine
from bench.turns import SETTLE
from weft.compile import compile_program
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.training.parallel import Parallel
from weft.train.opened import open_rank

RESULT = Path(__file__).parent / "results" / "pipeline.json"
CUT, BATCH, COUNTS = 4, 8, (4, 8)
"""The block that the second stage begins with, rows of a batch, numbers of micro-batches."""
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
WARM_UP = 3
SIDES = ("ours", "theirs")

Step = Callable[[], float | None]
"""Takes a step and returns its loss where that is known."""


class First(nn.Module):
    """The model up to the cut."""

    def __init__(self, whole: GPT) -> None:
        super().__init__()
        self.tokens, self.positions, self.blocks = whole.tokens, whole.positions, whole.blocks[:CUT]

    def forward(self, idx: Tensor) -> Tensor:
        x: Tensor = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        return x


class Last(nn.Module):
    """The model from the cut to its head."""

    def __init__(self, whole: GPT) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = whole.blocks[CUT:], whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def our_step(transport: ProcessTransport, files: dict[str, bytes]) -> Step:
    parallel = open_rank(files, transport, model())
    assert isinstance(parallel, Parallel)
    optimizer, batch = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True), example(BATCH)
    return lambda: float(parallel.train_step(batch, optimizer))


def their_step(rank: int, schedule: str, count: int) -> Step:
    whole = model()
    assert isinstance(whole, GPT)
    stage = First(whole) if rank == 0 else Last(whole)
    del whole
    placed = PipelineStage(stage, rank, 2, torch.device("cpu"))
    runs = SCHEDULES[schedule](placed, count, loss_fn=loss_of)
    optimizer, (idx, targets) = torch.optim.AdamW(stage.parameters(), lr=1e-3, fused=True), example(BATCH)

    def step() -> float | None:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if rank == 0:
            runs.step(idx, return_outputs=False)
        else:
            runs.step(target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return step


def memory() -> int:
    """Bytes that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def on_two(transport: ProcessTransport, payload: dict[str, Any]) -> dict[str, Any]:
    """One process of two: both sides in turn, or one of them for its memory."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=Path(payload["meeting"]).as_uri(), rank=transport.rank, world_size=transport.num_ranks
    )
    empty = memory()
    steps: dict[str, Step] = {}
    if "ours" in payload["sides"]:
        steps["ours"] = our_step(transport, payload["files"])
    if "theirs" in payload["sides"]:
        steps["theirs"] = their_step(transport.rank, payload["schedule"], payload["count"])
    found = alternate(steps, WARM_UP + payload["repeats"])
    found["memory"] = {"peak": memory(), "above_empty": memory() - empty}
    # torch joins the backend's threads while it holds the interpreter's lock: one that still wants it would hang
    time.sleep(SETTLE)
    dist.destroy_process_group()
    return found


def alternate(steps: dict[str, Step], repeats: int) -> dict[str, Any]:
    """Seconds and losses of each side, step by step in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    busy: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float | None]] = {name: [] for name in steps}
    for repeat in range(repeats):
        for name in list(steps) if repeat % 2 else reversed(list(steps)):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            losses[name].append(steps[name]())
            times[name].append(time.perf_counter() - start)
            busy[name].append(time.process_time() - cpu)
    return {"times": times, "busy": busy, "losses": losses}


def measured(schedule: str, count: int, repeats: int) -> dict[str, Any]:
    recipe = f"pp=2,microbatches={count},schedule={schedule},stages=blocks.{CUT}"
    files = dict(compile_program(model(), example(BATCH), recipe).files)
    payload = {"files": files, "schedule": schedule, "count": count}
    found = compared(run({**payload, "sides": SIDES, "repeats": repeats}))
    for side in SIDES:
        ranks = run({**payload, "sides": (side,), "repeats": 1})
        for key in ("peak", "above_empty"):
            found[f"{key}_memory_{side}"] = max(rank["memory"][key] for rank in ranks)
            found[f"{key}_memory_{side}_by_rank"] = [rank["memory"][key] for rank in ranks]
    for key in ("peak", "above_empty"):
        found[f"ratio_of_{key}_memory"] = found[f"{key}_memory_ours"] / found[f"{key}_memory_theirs"]
    return found


def run(payload: dict[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, Pool(2, preload=("bench.pipeline",)) as pool:
        return pool.run("bench.pipeline:on_two", {**payload, "meeting": f"{folder}/meeting"}, timeout=300)


def compared(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the steps of both sides; a step is as long as its slower rank."""
    losses = ranks[1]["losses"]
    assert max(abs(a - b) for a, b in zip(losses["ours"], losses["theirs"], strict=True)) < 0.01, losses
    steps = {side: [max(pair) for pair in zip(*(one["times"][side] for one in ranks), strict=True)] for side in SIDES}
    busy = {side: [sum(pair) for pair in zip(*(one["busy"][side] for one in ranks), strict=True)] for side in SIDES}
    ours, theirs = (statistics.median(steps[side][WARM_UP:]) for side in SIDES)
    cpu = [statistics.median(busy[side][WARM_UP:]) for side in SIDES]
    return {
        "ours": ours,
        "theirs": theirs,
        "ratio": ours / theirs,
        "ratio_of_minima": min(steps["ours"][WARM_UP:]) / min(steps["theirs"][WARM_UP:]),
        "ratio_of_cpu_time": cpu[0] / cpu[1],
        "last_losses": [losses[side][-1] for side in SIDES],
    }


def tell(name: str, found: dict[str, Any]) -> None:
    ours, theirs, ratio, busy = (found[key] for key in ("ours", "theirs", "ratio", "ratio_of_cpu_time"))
    print(
        f"{name}: ours {ours * 1e3:.0f} ms, theirs {theirs * 1e3:.0f} ms, ratio {ratio:.3f} "
        f"(of minima {found['ratio_of_minima']:.3f}, of processor time {busy:.3f})"
    )
    for key in ("peak", "above_empty"):
        pair = [found[f"{key}_memory_{side}"] / 2**20 for side in SIDES]
        print(f"  {key} memory: ours {pair[0]:.0f} MiB, theirs {pair[1]:.0f} MiB, ratio {pair[0] / pair[1]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="micro-batches")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "machine": machine(),
        "model": asdict(SIZES),
        "rows": BATCH,
        "cut": f"blocks.{CUT}",
        "pp2": {},
    }
    for schedule in options.schedules:
        for count in options.counts:
            name = f"{schedule}, {count} micro-batches"
            found["pp2"][name] = measured(schedule, count, options.repeats)
            tell(name, found["pp2"][name])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

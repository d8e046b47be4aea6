"""The largest GPT, by width, that trains within 2 GiB per rank on 4 ranks: ours against FSDP2 and DDP.

    python bench/largest.py [--methods ours FSDP2] [--limit 2GiB] [--out bench/results/largest.json]

All train a GPT of 12 layers on one row of 256 tokens per rank with fused AdamW, one thread per process. A trial runs
one method at one width in processes of its own. What counts is the most that a rank had resident (VmHWM) while it made
its module and trained two steps, above what it had before with everything imported; memory that processes share
counts in each of them. Widths are multiples of 64, tried by bisection until neighbours fit and do not fit; where to try
next is guessed from the trials before. Ours runs with every block recomputed, and once more with co-shard: attention
and MLP in two chunks, one after the other, each with its own parts of the weights. FSDP2 runs as it comes, with every
block checkpointed, and both once more with processes that give memory back as ours do (`weft/runtime/jobs/heap.py`).
Nothing is judged here.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from bench.machine import machine
from bench.memory import MEBI, resident
from bench.overhead import averaged, stepper
from bench.sharded import share
from bench.turns import Step, torch_group
from weft.compile import compile_program
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.start.initialise import begin
from weft.train.memory.amounts import read_bytes
from weft.train.opened import open_rank
from weft.train.weights import Replayed

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "largest.json"
RANKS, LAYERS, HEAD, LENGTH, VOCABULARY, STEPS = 4, 12, 64, 256, 8192, 2
UNIT = 64
PLANS = {
    "ours": f"dp={RANKS},zero=3,recompute=blocks.*",
    "ours with co-shard": f"dp={RANKS},zero=3,recompute=blocks.*,coshard=2",
}
GIVING = ", giving memory back"
BYTES = {
    "ours": 5.04,
    "ours with co-shard": 4.85,
    "FSDP2": 8.0,
    f"FSDP2{GIVING}": 6.95,
    "FSDP2 with checkpoints": 7.0,
    f"FSDP2 with checkpoints{GIVING}": 5.88,
    "DDP": 18.9,
}
"""Bytes per parameter of a rank, roughly: where the search begins."""


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (one.view(rows, length, -1, HEAD).transpose(1, 2) for one in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks, self.norm = nn.ModuleList(Block(width) for _ in range(LAYERS)), nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def example() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (RANKS, LENGTH + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def hollow(width: int) -> GPT:
    """The model without its memory."""
    with torch.device("meta"):
        return GPT(width)


def num_parameters(width: int) -> int:
    return sum(parameter.numel() for parameter in hollow(width).parameters())


def ours(transport: ProcessTransport, files: Any, width: int) -> Step:
    """The rank's parts are made one parameter at a time, as `parallelize` does with a function."""
    start = begin(lambda: GPT(width), 0)
    assert start.record is not None, start.reason
    return stepper(open_rank(files, transport, Replayed(start.record)), example())


def fsdp2(width: int, *, checkpoints: bool) -> Step:
    """FSDP2; parts are made without the whole model."""
    made, mesh = hollow(width), init_device_mesh("cpu", (dist.get_world_size(),))
    for at, block in enumerate(made.blocks):
        made.blocks[at] = checkpoint_wrapper(block) if checkpoints else block
        fully_shard(made.blocks[at], mesh=mesh, reshard_after_forward=True)
    fully_shard(made, mesh=mesh)
    made.to_empty(device="cpu")
    for parameter in made.parameters():
        nn.init.normal_(parameter.to_local(), std=0.02)
    return stepper(made, share(example()))


def ddp(width: int) -> Step:
    return stepper(DistributedDataParallel(GPT(width), gradient_as_bucket_view=True), share(example()))


def one_side(transport: ProcessTransport, payload: dict[str, Any]) -> dict[str, Any]:
    """One process of a trial."""
    width = payload["width"]
    makers: dict[str, Callable[[], Step]] = {
        **dict.fromkeys(PLANS, lambda: ours(transport, payload["files"], width)),
        "FSDP2": lambda: fsdp2(width, checkpoints=False),
        "FSDP2 with checkpoints": lambda: fsdp2(width, checkpoints=True),
        "DDP": lambda: ddp(width),
    }
    with torch_group(transport, payload["meeting"]):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        step = makers[payload["method"]]()
        peaks = [resident("VmHWM") - before]
        start = time.perf_counter()
        for _ in range(payload["steps"]):
            loss = averaged(step, RANKS)()
            assert math.isfinite(loss), loss
            peaks.append(resident("VmHWM") - before)
        seconds = (time.perf_counter() - start) / payload["steps"]
        return {"peak": peaks[-1], "peaks": peaks, "before": before, "seconds": seconds}


def trial(method: str, width: int, steps: int) -> dict[str, Any]:
    """One method at one width: bytes of the fullest rank."""
    files = compile_program(hollow(width), example(), PLANS[method]).files if method in PLANS else None
    pool = Pool(RANKS, preload=("bench.largest",), gives_back=method in PLANS or method.endswith(GIVING))
    with tempfile.TemporaryDirectory() as folder, pool:
        payload = {
            "files": files,
            "method": method.removesuffix(GIVING),
            "width": width,
            "steps": steps,
            "meeting": f"{folder}/meeting",
        }
        told = pool.run("bench.largest:one_side", payload, timeout=900)
    fullest = max(told, key=lambda rank: rank["peak"])
    found = {"width": width, "parameters": num_parameters(width), **fullest}
    peaks = ", ".join(f"{peak / MEBI:.0f}" for peak in found["peaks"])
    size = f"width {width}, {found['parameters'] / 1e6:.1f} million parameters"
    print(f"{method}, {size}: made and after each step {peaks} MiB, {found['seconds']:.1f} s a step", flush=True)
    return found


def search(method: str, limit: int, steps: int) -> dict[str, Any]:
    """The largest width that fits, between a trial that fits and one of the next width that does not."""
    trials: dict[int, dict[str, Any]] = {}
    fits, fails = 0, 0
    width = guess(limit / BYTES[method])
    while not fails or fails - fits > UNIT:
        trials[width] = trial(method, width, steps)
        if trials[width]["peak"] <= limit:
            fits = max(fits, width)
        else:
            fails = min(fails or width, width)
        per_parameter = trials[width]["peak"] / trials[width]["parameters"]
        width = max(guess(limit / per_parameter), fits + UNIT)
        width = min(width, fails - UNIT) if fails else width
    return {**trials[fits], "first_that_does_not_fit": trials[fails], "num_trials": len(trials)}


def guess(parameters: float) -> int:
    """The largest width with at most so many parameters."""
    width = UNIT
    while num_parameters(width + UNIT) <= parameters:
        width += UNIT
    return width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", default=list(BYTES), choices=list(BYTES))
    parser.add_argument("--limit", default="2GiB")
    parser.add_argument("--width", type=int, help="try this width only, and write nothing")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.width:
        for method in options.methods:
            trial(method, options.width, options.steps)
        return
    model = {"layers": LAYERS, "head": HEAD, "length": LENGTH, "vocabulary": VOCABULARY, "rows_per_rank": 1}
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    found |= {
        "machine": machine(),
        "model": model,
        "ranks": RANKS,
        "limit": read_bytes(options.limit),
        "plans": PLANS,
        "steps": options.steps,
    }
    for method in options.methods:
        found[method] = search(method, found["limit"], options.steps)
        for mine, peer in itertools.product(PLANS, BYTES.keys() - PLANS.keys()):
            if mine in found and peer in found:
                found[f"{mine} to {peer}"] = found[mine]["parameters"] / found[peer]["parameters"]
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What `bench/memory.py` and `bench/state.py` compare: state stored in parts, ours and torch's, on the same processes.

    zero=3   torch.distributed.fsdp.fully_shard of every block and of the root (FSDP2)
    zero=1   DistributedDataParallel with torch.distributed.optim.ZeroRedundancyOptimizer

All train the GPT of `bench/gpt.py` with fused AdamW, one thread per process, each rank on its share of one batch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.gpt import GPT, SIZES, model
from bench.machine import machine
from bench.overhead import averaged, stepper
from bench.turns import Step
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.start.initialise import begin
from weft.train.opened import open_rank
from weft.train.weights import Replayed

PEERS = {"zero=3": "FSDP2", "zero=1": "ZeroRedundancyOptimizer"}


def ours(transport: ProcessTransport, files: Any, batch: Any) -> Step:
    """The rank's parts are made one parameter at a time, as `parallelize` does with a function."""
    start = begin(model, 0)
    assert start.record is not None, start.reason
    return stepper(open_rank(files, transport, Replayed(start.record)), batch)


def fsdp2(batch: Any, *, hollow: bool) -> Step:
    """FSDP2; `hollow`: parts are made without the whole model, and so of other values than ours."""
    with torch.device("meta" if hollow else "cpu"):
        made = GPT() if hollow else model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in made.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(made, mesh=mesh)
    if hollow:
        made.to_empty(device="cpu")
        for parameter in made.parameters():
            nn.init.normal_(parameter.to_local(), std=0.02)
    return averaged(stepper(made, share(batch)), dist.get_world_size())


def redundancy(batch: Any) -> Step:
    """DDP, with the optimizer's state spread over the ranks."""
    module = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3, fused=True)
    mine = share(batch)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = module(*mine)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return averaged(step, dist.get_world_size())


def theirs(name: str, batch: Any, *, hollow: bool) -> Step:
    """The peer of a stage."""
    makers: dict[str, Callable[[], Step]] = {
        "zero=3": lambda: fsdp2(batch, hollow=hollow),
        "zero=1": lambda: redundancy(batch),
    }
    return makers[name]()


def share(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The rank's rows."""
    return tuple(tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in batch)


Compare = Callable[[str, int, int, int], dict[str, Any]]
"""From a stage, ranks, rows and repeats to what was found."""


def compare_all(
    about: str | None, result: Path, repeats: int, compare: Compare, say: Callable[[str, int, dict[str, Any]], None]
) -> None:
    """The command of a bench: every stage on every number of ranks, told and written down."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--stages", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--batch", type=int, default=SIZES.batch)
    parser.add_argument("--out", type=Path, default=result)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "machine": machine(),
        "model": asdict(SIZES),
        "parameters": sum(p.numel() for p in GPT().parameters()),
        "batch": options.batch,
    }
    for ranks in options.ranks:
        for name in options.stages:
            found[f"{name} on {ranks}"] = compare(name, ranks, options.batch, options.repeats)
            say(name, ranks, found[f"{name} on {ranks}"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")

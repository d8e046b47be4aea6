"""Run by torchrun: `python -m torch.distributed.run ... tests/train/scripts.py RESULT WHAT`."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import weft
from tests.train.eager import STEPS, adamw, mlp


def main(path: str, what: str) -> None:
    module, batch = mlp()
    if what == "different":
        torch.nn.init.constant_(module.up.bias, float(_rank()))
    if what == "same":
        refuse_alike(module, batch)
    plan = "pp=2,microbatches=4" if what == "pieces" else "dp=2"
    parallel = weft.parallelize(module, batch, plan, cache=None)
    if what == "same":
        refuse_wrapped(parallel)
    optimizer = adamw(parallel)
    losses = [parallel.train_step(batch, optimizer).item() for _ in range(STEPS)]
    if what == "pieces":
        # its program is made now, by all ranks
        few = {name: tensor[:5] for name, tensor in batch.items()}
        evaluated = parallel.eval()(**few).item()
        torch.save((losses, parallel.local_state_dict(), evaluated), f"{path}{_rank()}")
        return
    with torch.no_grad():
        evaluated = parallel.eval()(**batch).item()
    if _rank() == 0:
        torch.save((losses, dict(parallel.state_dict()), evaluated), path)


def refuse_alike(module: torch.nn.Module, batch: Any) -> None:
    """What rank 0 finds wrong is raised on all ranks, which then go on."""
    found = []
    for plan, limit in (("dp=2,zero=9", None), ("dp=2", 16)):
        try:
            weft.parallelize(module, batch, plan, cache=None, memory_limit=limit)
        except weft.errors.WeftError as error:
            found.append((type(error).__name__, error.message, error.place, error.remedy))
    told: list[Any] = [None, None]
    torch.distributed.all_gather_object(told, found)
    assert told[0] == told[1] and len(found) == 2, told


def refuse_wrapped(parallel: torch.nn.Module) -> None:
    """Every rank refuses, before anything is sent."""
    for module in (parallel, torch.nn.Sequential(torch.nn.Linear(2, 2), parallel)):
        try:
            torch.nn.parallel.DistributedDataParallel(module)
        except weft.errors.RunError as error:
            assert "train it as it is" in error.remedy
        else:
            raise AssertionError("DistributedDataParallel took a parallel module")


def _rank() -> int:
    return int(os.environ["RANK"])


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Run by torchrun: `python -m torch.distributed.run ... tests/train/scripts.py RESULT WHAT`."""

from __future__ import annotations

import os
import sys

import torch

import weft
from tests.train.eager import STEPS, adamw, mlp


def main(path: str, what: str) -> None:
    module, batch = mlp()
    if what == "different":
        torch.nn.init.constant_(module.up.bias, float(_rank()))
    plan = "pp=2,microbatches=4" if what == "pieces" else "dp=2"
    parallel = weft.parallelize(module, batch, plan, cache=None)
    optimizer = adamw(parallel)
    losses = [parallel.train_step(batch, optimizer).item() for _ in range(STEPS)]
    if what == "pieces":
        # its program is made now, by all ranks
        few = {name: tensor[:5] for name, tensor in batch.items()}
        evaluated = parallel.eval()(**few).item()
        torch.save((losses, dict(parallel.state_dict()), evaluated), f"{path}{_rank()}")
        return
    with torch.no_grad():
        evaluated = parallel.eval()(**batch).item()
    if _rank() == 0:
        torch.save((losses, dict(parallel.state_dict()), evaluated), path)


def _rank() -> int:
    return int(os.environ["RANK"])


if __name__ == "__main__":
    main(*sys.argv[1:])

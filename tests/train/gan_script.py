"""Run by torchrun: the GAN of the examples; losses and this rank's weights go to PATH + rank."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch


def main(path: str) -> None:
    spec = importlib.util.spec_from_file_location("gan", Path(__file__).parents[2] / "examples" / "gan.py")
    assert spec is not None and spec.loader is not None
    gan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gan)
    parallel = gan.parallel(torch.float64)
    losses = gan.train(*parallel, 4, torch.float64)
    torch.save((losses, [module.local_state_dict() for module in parallel]), f"{path}{os.environ['RANK']}")


if __name__ == "__main__":
    main(*sys.argv[1:])

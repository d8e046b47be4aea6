"""Random graphs under random plans: folded and traced text give the same bits, and what is emitted is formatted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.property.graphs import random_case
from tests.property.harness import run_ranks_of
from tests.property.plans import random_plan
from weft.codegen import generate
from weft.compile.cache import write_files
from weft.errors import PlanError, RuleError
from weft.lower import lower

QUICK, FULL, SHARDS = 80, 2000, 2


def run_seed(seed: int, directory: Path) -> bool:
    """True if the plan could be lowered and the two agree."""
    case = random_case(seed)
    plan = random_plan(case.graph, seed * 7 + 1)
    try:
        program = lower(plan, outputs="all" if seed % 2 else "loss")
        files = generate(program)
    except (PlanError, RuleError):
        return False
    directory.mkdir()
    write_files(directory, files)
    folded, traced = (run_ranks_of(program, case.state, case.inputs, traced=one, timeout=20) for one in (False, True))
    for rank, (ours, theirs) in enumerate(zip(folded, traced, strict=True)):
        for what, mine, wanted in zip(("output", "gradient of", "buffer"), ours, theirs, strict=False):
            assert mine.keys() == wanted.keys(), f"seed {seed}, rank {rank}: {what} {mine.keys()} {wanted.keys()}"
            for name, tensor in mine.items():
                same = torch.equal(tensor.nan_to_num(), wanted[name].nan_to_num())
                assert same, f"seed {seed}, rank {rank}: {what} {name}"
    return True


def run_seeds(seeds: range, folder: Path) -> None:
    run = sum(run_seed(seed, folder / str(seed)) for seed in seeds)
    assert run > len(seeds) / 2
    found = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--diff", "--quiet", "--line-length=120", "--isolated", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_programs(shard: int, tmp_path: Path) -> None:
    size = QUICK // SHARDS
    run_seeds(range(shard * size, (shard + 1) * size), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("shard", range(10))
def test_many_random_programs(shard: int, tmp_path: Path) -> None:
    size = FULL // 10
    run_seeds(range(QUICK + shard * size, QUICK + (shard + 1) * size), tmp_path)

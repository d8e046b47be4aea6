"""parallelize() in a script of the user's, started by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.eager import check_same, mlp, train_eager

ROOT = Path(__file__).parents[2]


def launch(path: Path, what: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*argv, str(ROOT / "tests" / "train" / "scripts.py"), str(path), what],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def test_two_processes_train_as_one_and_evaluate(tmp_path: Path) -> None:
    done = launch(tmp_path / "result", "same")
    assert done.returncode == 0, done.stderr
    losses, state, evaluated = torch.load(tmp_path / "result", weights_only=True)
    module, batch = mlp()
    check_same((losses, state), train_eager(module, batch))
    module.load_state_dict(state)
    assert evaluated == pytest.approx(module.eval()(**batch).item(), rel=1e-12)


@pytest.mark.full
def test_modules_that_differ_are_refused(tmp_path: Path) -> None:
    done = launch(tmp_path / "result", "different")
    assert done.returncode != 0 and "the modules of ranks" in done.stderr

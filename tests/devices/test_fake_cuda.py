"""Training steps on fake CUDA tensors: no operator mixes devices, and how many calls of the backend a step makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("c++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the guard of fake devices")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guard of fake devices, compiled against torch's headers."""
    found = find_spec("torch")
    assert found is not None and found.origin is not None and COMPILER is not None
    root, made = Path(found.origin).parent, tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so"
    paths = [f"-I{root}/include", f"-L{root}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
    command = [COMPILER, "-shared", "-fPIC", "-std=c++20", str(HERE / "fake_cuda.cpp"), "-o", str(made), *paths]
    subprocess.run(command, check=True, timeout=300)
    return made


def run(library: Path, plan: str) -> dict[str, Any]:
    root = HERE.parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "fake_cuda.py"), str(library), plan],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("plan", "calls"),
    [
        ("dp=2,tp=2", {"allreduce": 20}),
        ("dp=2,zero=3", {"_allgather_base": 53, "_reduce_scatter_base": 28, "allreduce": 3}),
        pytest.param("dp=2", {"allreduce": 4}, marks=pytest.mark.full),
        pytest.param("tp=2", {"allreduce": 12}, marks=pytest.mark.full),
    ],
)
def test_a_step_on_fake_devices(library: Path, plan: str, calls: dict[str, int]) -> None:
    """Of a GPT of two layers: 29 parameters, of which a rank of zero=3 stores shards."""
    found = run(library, plan)
    assert found["calls"] == [calls, calls] and found["where"] == ["cuda:0"] and not found["missing"]
    # the caller's thread, and autograd's for the device: none of the transport's
    assert not [name for name in found["threads"] if name.startswith("rank")]

"""Training steps on fake CUDA tensors: no operator mixes devices or waits for the host, and which calls of the backend
a step makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
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


QUICK = {
    ("gpt.py", "dp=2,tp=2"): {"allreduce": [21, 184_072]},
    ("gpt.py", "dp=2,zero=3"): {
        "_allgather_base": [4, 228_096],
        "_reduce_scatter_base": [2, 114_176],
        "allreduce": [3, 2_056],
    },
    ("models/resnet.py", "dp=2"): {"allreduce": [93, 94_808]},
}
FULL = {
    ("gpt.py", "dp=2"): {"allreduce": [4, 116_232]},
    ("gpt.py", "tp=2"): {"allreduce": [13, 248_064]},
    ("gpt.py", "tp=2,megatron"): {"allreduce": [13, 248_064]},
    ("gpt.py", "tp=2,megatron,sp"): {
        "_allgather_base": [10, 245_760],
        "allreduce": [4, 5_632],
        "alltoall_base": [10, 122_880],
    },
    ("gpt.py", "dp=2,zero=1"): {
        "_allgather_base": [2, 116_224],
        "_reduce_scatter_base": [2, 114_176],
        "allreduce": [3, 2_056],
    },
    ("gpt.py", "dp=2,spread"): {"allreduce": [30, 116_232], "alltoall_base": [28, 116_224]},
    ("gpt.py", "dp=2,recompute=full"): {"allreduce": [4, 116_232]},
    ("gpt.py", "coshard=2"): {},
    ("moe.py", "tp=2"): {"_allgather_base": [1, 384], "allreduce": [4, 1_824]},
    ("lora.py", "dp=2,tp=2"): {"_allgather_base": [7, 16_128], "allreduce": [26, 36_648], "alltoall_base": [2, 384]},
    ("custom_ops.py", "dp=2"): {"allreduce": [2, 3_556]},
    ("dynamic.py", "dp=2"): {"allreduce": [3, 114_184]},
    ("checkpointed.py", "dp=2"): {"allreduce": [4, 109_576]},
    ("models/llama.py", "dp=2,tp=2,zero=3"): {
        "_allgather_base": [4, 155_904],
        "_reduce_scatter_base": [2, 87_360],
        "allreduce": [14, 55_688],
        "alltoall_base": [14, 34_176],
    },
    ("models/t5.py", "tp=2"): {"allreduce": [27, 215_520]},
    ("models/bert.py", "dp=2,tp=2"): {
        "_allgather_base": [2, 6_208],
        "allreduce": [24, 157_676],
        "alltoall_base": [1, 3_072],
    },
    ("models/swin.py", "dp=2"): {"allreduce": [7, 232_472]},
    ("models/recommender.py", "dp=2,tp=2"): {"allreduce": [8, 1_139_624], "alltoall_base": [1, 1_152]},
    ("models/vit.py", "tp=2"): {"_allgather_base": [1, 24_576], "allreduce": [16, 314_976]},
    ("models/unet.py", "dp=2"): {"allreduce": [2, 1_153_648]},
    ("models/state_space.py", "dp=2,zero=3"): {
        "_allgather_base": [4, 105_792],
        "_reduce_scatter_base": [2, 56_736],
        "allreduce": [4, 2_312],
    },
    ("models/evoformer.py", "dp=2"): {"_allgather_base": [30, 552_960], "allreduce": [6, 747_036]},
    ("models/gemma.py", "tp=2"): {"allreduce": [13, 123_648]},
    ("models/graph.py", "dp=2"): {"_allgather_base": [9, 31_104], "allreduce": [3, 50_144]},
    ("models/qwen3.py", "tp=2"): {"allreduce": [14, 123_904]},
}
"""Calls and bytes of a step by kind. Experts whose groups torch's kernel does not multiply in float32 on devices are
missing: the host waits for their sizes."""
UNUSED = {"models/graph.py": 2}
"""Parameters without a gradient, on one device too."""


def run(library: Path, cases: Collection[tuple[str, str]]) -> list[dict[str, Any]]:
    root = HERE.parent.parent
    words = [word for file, plan in cases for word in (f"examples/{file}", plan)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "fake_cuda.py"), str(library), *words],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("expected", [QUICK, pytest.param(FULL, marks=pytest.mark.full)], ids=["sample", "all"])
def test_steps_on_fake_devices(library: Path, expected: dict[tuple[str, str], dict[str, list[int]]]) -> None:
    for (case, calls), found in zip(expected.items(), run(library, expected), strict=True):
        assert found["calls"] == [calls, calls], case
        assert found["where"] == ["cuda:0"] and not found["on host"], case
        assert found["missing"] == UNUSED.get(case[0], 0), case
        # the caller's thread, and autograd's for the device: none of the transport's
        assert not [name for name in found["threads"] if name.startswith("rank")], case

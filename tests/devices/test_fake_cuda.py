"""Steps on fake CUDA tensors: no operator mixes devices or waits for the host, and which calls of the backend a step
makes. `make golden` rewrites `fake_calls.json`, for the cases that it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.devices.fake_cases import NOT_RUN, SAMPLE, WAITS, everything, model_files
from tests.devices.fake_cuda import ROOT, Case

HERE = Path(__file__).parent
GOLDEN = HERE / "fake_calls.json"
"""Of each case, calls and bytes of a step, and of an evaluation, by kind."""
COMPILER = shutil.which("g++") or shutil.which("c++")
CHUNK = 20
"""Cases of one process."""
UNUSED = {"models/graph.py": 2}
"""Parameters without a gradient, on one device too."""

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the guard of fake devices")


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


def lines(*command: str) -> list[Any]:
    """What a script of its own process tells, line by line."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def run(library: Path, cases: Sequence[Case]) -> list[dict[str, Any]]:
    return lines(str(HERE / "fake_cuda.py"), str(library), *(json.dumps(asdict(case)) for case in cases))


def chunks() -> list[object]:
    """Cases that run in one process each: the sample always."""
    others = [case for case in everything() if case not in SAMPLE]
    parts = [others[at : at + CHUNK] for at in range(0, len(others), CHUNK)]
    return [SAMPLE, *(pytest.param(part, marks=pytest.mark.full) for part in parts)]


def ids(cases: Sequence[Case]) -> str:
    return f"{cases[0]}, ..."


@needs_compiler
@pytest.mark.parametrize("cases", chunks(), ids=ids)
def test_steps_on_fake_devices(library: Path, cases: Sequence[Case], request: pytest.FixtureRequest) -> None:
    golden = json.loads(GOLDEN.read_text())
    for case, found in zip(cases, run(library, cases), strict=True):
        assert "failed" not in found, f"{case}: {found['failed']}"
        waits = {one for one in found["on host"] if WAITS.get(case.file, "nowhere") not in one}
        assert not waits, f"{case}: {waits}"
        assert found["where"] == ["cuda:0"], case
        assert found["missing"] == UNUSED.get(case.file, 0), case
        # the caller's thread, and autograd's for the device: none of the transport's
        assert not [name for name in found["threads"] if name.startswith("rank")], case
        if request.config.getoption("--golden"):
            golden[str(case)] = found["calls"]
        assert found["calls"] == golden.get(str(case)), case
    if request.config.getoption("--golden"):
        told = (f"{json.dumps(case)}: {json.dumps(calls)}" for case, calls in sorted(golden.items()))
        GOLDEN.write_text("{\n" + ",\n".join(told) + "\n}\n")


def test_every_case_is_expected() -> None:
    assert {str(case) for case in (*SAMPLE, *everything())} == json.loads(GOLDEN.read_text()).keys()


def test_every_file_under_examples_is_run() -> None:
    run = {case.file for case in everything()} | {Path(case.plan.partition(":")[0]).name for case in everything()}
    assert run | NOT_RUN.keys() >= {*model_files(), *(one.name for one in ROOT.glob("examples/plans/*.py"))}
    assert not run & NOT_RUN.keys()


@needs_compiler
@pytest.mark.parametrize("layers", [6, pytest.param(32, marks=pytest.mark.full)])
def test_calls_of_zero3_are_at_most_those_of_fsdp2(library: Path, tmp_path: Path, layers: int) -> None:
    """A Llama: parameters are gathered and gradients scattered by block, and the loss is summed."""
    file = tmp_path / "llama.py"
    file.write_text((HERE / "deep_llama.py").read_text().replace("LAYERS = 32", f"LAYERS = {layers}"))
    (ours,) = run(library, [Case(str(file), "dp=2,zero=3")])
    assert "failed" not in ours and not ours["on host"], ours
    mine = {kind: number for kind, (number, _) in ours["calls"]["step"].items()}
    ((_, theirs),) = lines(str(HERE / "fsdp2.py"), str(file))
    # by layer, forward and backward; what lies outside of layers is gathered once
    assert theirs == {"_allgather_base_": 2 * layers + 1, "_reduce_scatter_base_": layers + 1}
    assert mine["_allgather_base"] <= theirs["_allgather_base_"], mine
    assert mine["_reduce_scatter_base"] <= theirs["_reduce_scatter_base_"], mine
    # of the loss, and of the tokens that it counts
    assert ours["calls"]["step"]["allreduce"] == [2, 8]

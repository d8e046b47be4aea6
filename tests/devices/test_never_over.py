"""Collectives that never end: the job does, a few seconds after its limit, and says which call it was and who lacks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed import TCPStore

from tests.devices import never
from tests.pools import Pools
from tests.processes import bodies
from tests.train.test_disagree import made
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.transport import CollectiveMismatch

ROOT = Path(__file__).parents[2]
LATE = 5.0
"""Seconds after the limit."""


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ups, self.downs = (nn.ModuleList(nn.Linear(*sizes) for _ in range(2)) for sizes in ((6, 8), (8, 6)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(up(x).relu())
        return (x - y).square().mean()


def told(pool: Pool, body: Callable[..., Any], given: Any) -> CollectiveMismatch:
    pool.run(bodies.identity)
    start = time.monotonic()
    with pytest.raises(CollectiveMismatch) as caught:
        pool.run(body, given, timeout=never.LIMIT)
    took = time.monotonic() - start
    assert took > never.LIMIT
    # to open the module, and the steps before
    assert took < never.LIMIT + LATE + 4.0
    return caught.value


def test_a_device_that_waits_while_the_host_goes_on(pools: Pools) -> None:
    start = time.monotonic()
    error = told(pools(2), never.leaves_out_a_sum, "")
    assert error.first == (
        "rank 0 waited 2 s for all_reduce(sum) of float32[3, 2], call 1 of group (0, 1), which rank 1 has not entered"
    )
    assert error.waits[0] == (
        "is in all_reduce(sum) of float32[3, 2], call 1 of group (0, 1), waiting for rank 1 "
        "(in reshard all_reduce over tp at model.py:7 (program.py:12), step 1)"
    )
    assert error.waits[1].startswith("is running (in reshard") and error.waits[1].endswith("step 1)")
    assert time.monotonic() - start < 60


def test_a_device_that_waits_in_one_of_two_modules(pools: Pools) -> None:
    error = told(pools(2), never.leaves_out_a_sum_of_the_second, None)
    call = "all_reduce(sum) of float32[3, 2], call 1 of group (0, 1)"
    assert error.first == f"rank 0 waited 2 s for {call}, which rank 1 has not entered"
    assert error.waits == {
        0: f"is in {call}, waiting for rank 1 (in sum of Second at model.py:1, step 1 of Second)",
        1: "is running (in sum of First at model.py:1, step 1 of First)",
    }


@pytest.mark.parametrize("on_device", [pytest.param(False, marks=pytest.mark.full), True], ids=["gloo", "device"])
@pytest.mark.parametrize(
    ("what", "plan", "doing"),
    [
        ("training", "tp=2", "in the beginning of training [(8, 6), (8, 6)], step 1"),
        ("backward", "dp=2,spread", "in gradient sync of "),
        ("evaluation", "tp=2", "in the beginning of evaluation"),
    ],
)
def test_a_rank_that_leaves_out_a_step(pools: Pools, what: str, plan: str, doing: str, on_device: bool) -> None:
    error = told(pools(2), never.leaves_out, (*made(plan, Blocks().double()), what, on_device))
    assert error.first.startswith("rank 0 waited 2 s for all_")
    assert error.first.endswith("of group (0, 1), which rank 1 has not entered")
    assert f"waiting for rank 1 ({doing}" in error.waits[0], error.waits
    assert error.waits[1].startswith("is running")


SCRIPT = """
import os, sys, time
import torch
import weft
from tests.train.eager import adamw, mlp

module, batch = mlp()
parallel = weft.parallelize(module, batch, "tp=2", cache=None, timeout=3)
optimizer = adamw(parallel)
for step in range(3):
    print("begin", flush=True)
    if (os.environ["RANK"], step) == ("1", 1):
        time.sleep(600)
    parallel.train_step(batch, optimizer)
"""


@contextmanager
def two_ranks(folder: Path, script: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of a script."""
    (folder / "script.py").write_text(script)
    # as torchrun does: the store outlives every rank
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    shared |= {
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=folder,
            env={**shared, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        yield ranks
    finally:
        for one in ranks:
            one.kill()
    del store


def ended(ranks: list[subprocess.Popen[str]], steps: int, limit: float) -> list[str]:
    """What ranks say that end by themselves, so many seconds after rank 0 has begun its last step."""
    first = ranks[0].stdout
    assert first is not None
    assert [first.readline() for _ in range(steps)] == ["begin\n"] * steps
    start = time.monotonic()
    told = [one.communicate(timeout=60)[1] for one in ranks]
    # interpreters end too, on a machine that may be busy
    assert time.monotonic() - start < limit + 3 * LATE
    assert all(one.returncode for one in ranks)
    return told


def test_every_rank_of_a_script_says_why_it_ended(tmp_path: Path) -> None:
    with two_ranks(tmp_path, SCRIPT) as ranks:
        told = ended(ranks, 2, 3)
    for text in told:
        assert "rank 0 waited 3 s for all_gather" in text and "which rank 1 has not entered" in text, text
        assert "in the beginning of training" in text and "try: " in text
    assert "rank 1 was ended: rank 0 waited" in told[1]


TWO = """
import os, time
import torch
import weft

class First(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()

class Second(First):
    pass

torch.manual_seed(0)
modules = [
    weft.parallelize(kind(6, 6), (torch.randn(8, 6),), "tp=2", cache=None, timeout=3 if WAITS else 60)
    for kind in (First, Second)
]
first, second = modules if os.environ["RANK"] == "0" else modules[::-1]
for module in modules:
    module(torch.ones(8, 6)).backward()
print("begin", flush=True)
if WAITS and os.environ["RANK"] == "1":
    time.sleep(600)
first(torch.ones(8, 6))
"""


@pytest.mark.parametrize("waits", [False, True], ids=["both wait", "one is busy"])
def test_a_rank_with_two_modules_says_in_which_it_waits(tmp_path: Path, waits: bool) -> None:
    with two_ranks(tmp_path, TWO.replace("WAITS", str(waits))) as ranks:
        told = ended(ranks, 1, 3)
    busy = "rank 1 is running (outside any op, step 0 of Second)"
    other = busy if waits else "waiting for rank 0 (in the beginning of training [(8, 6)], step 1 of Second)"
    # in a deadlock one rank says it, and the other that it was stopped
    text = "\n".join(told)
    assert ("rank 0 waited 3 s for all_gather" if waits else "deadlock: no rank can go on") in text, text
    assert "waiting for rank 1 (in the beginning of training [(8, 6)], step 1 of First)" in text, text
    assert other in text, text
    assert text.count("weft: 2 ranks on cpu over gloo") == 1, text


MODEL = """
import multiprocessing, time
import torch
import weft
from torch import nn

@weft.register_op("b h -> b h")
def slow(x: torch.Tensor) -> torch.Tensor:
    if multiprocessing.current_process().name == "weft rank SLOW":
        time.sleep(600)
    return x * 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.a(x)
        return self.b(slow(y)).square().mean()

def model():
    return Net()

def example():
    return (torch.randn(4, 4),)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "slow", "told"),
    [
        (
            "tp=2",
            1,
            ["rank 0 waited 2 s for all_reduce(sum)", "in reshard all_reduce over tp at model.py:20 (program.py:"],
        ),
        (
            "pp=2,microbatches=2",
            0,
            ["rank 1 waited 2 s for ", "micro-batch 0 from rank 0", "(in F0 of model at model.py:20, step 1)"],
        ),
    ],
)
def test_verify_on_processes(tmp_path: Path, plan: str, slow: int, told: list[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL.replace("SLOW", str(slow)))
    words = ["verify", "model.py", "--plan", plan, "--processes", "--timeout", "2"]
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "weft", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert all(words in done.stderr for words in [*told, "now at model.py:20 ("]), done.stderr
    # processes start, and the model is compiled
    assert time.monotonic() - start < 60

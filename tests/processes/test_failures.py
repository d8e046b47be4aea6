"""Every way to fail between processes: one clear error in seconds, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.processes import bodies
from tests.processes.conftest import Pools
from weft.runtime.jobs.launch import Pool, ProcessFailed
from weft.runtime.links.transport import CollectiveMismatch, RankFailed

ROOT = Path(__file__).parents[2]
QUICK = 30.0
"""Seconds, on a busy machine, and far below any timeout."""


@pytest.fixture
def ready(pools: Pools) -> Callable[[int], Pool]:
    """A pool whose processes are there: starting them is not what is timed."""

    def get(num_ranks: int) -> Pool:
        pool = pools(num_ranks)
        pool.run(bodies.identity)
        return pool

    return get


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    yield
    ours = {str(os.getpid()), str(_forkserver._forkserver_pid)}
    everyone = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    dead = [pid for pid in everyone if _status(pid, "PPid") in ours and _status(pid, "State") == "Z"]
    assert not dead, "a dead process was not waited for"


def _status(pid: int, key: str) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return next((line.split()[1] for line in lines if line.startswith(f"{key}:")), "")


def _is_alive(pid: int) -> bool:
    return _status(pid, "State") not in ("", "Z", "X")


def failed(pool: Pool, body: Callable[..., Any], kind: type[Exception], **options: Any) -> Any:
    """The error, after making sure that it came at once and ended all processes."""
    ids, start = pool.process_ids, time.monotonic()
    with pytest.raises(kind) as caught:
        pool.run(body, **options)
    assert time.monotonic() - start < QUICK
    assert len(ids) == pool.num_ranks and not any(_is_alive(pid) for pid in ids)
    return caught.value


def test_a_rank_that_raises(ready: Callable[[int], Pool]) -> None:
    error = failed(ready(3), bodies.raises, RankFailed)
    assert str(error).startswith("rank 1 failed in step 2 in mlp/linear at model.py:7: ValueError: bad luck")
    assert (error.rank, error.op, error.place, error.step) == (1, "mlp/linear", "model.py:7", 2)
    assert "all_reduce(sum) of float32[2]" in error.waits[0] and "waiting for rank 1" in error.waits[0]
    assert "bodies.py" in "".join(error.__cause__.__notes__), "the trace of the rank is told"


def test_a_rank_that_is_killed(ready: Callable[[int], Pool]) -> None:
    error = failed(ready(3), bodies.is_killed, ProcessFailed)
    assert "rank 1 failed in step 2 in mlp/linear at model.py:7" in str(error) and "SIGKILL" in str(error)
    for rank in (0, 2):
        assert f"rank {rank} is in all_reduce(sum) of float32[2], call 1 of group (0, 1, 2)" in str(error)
        assert "waiting for rank 1" in error.waits[rank]


def test_a_rank_killed_from_outside(ready: Callable[[int], Pool]) -> None:
    """While nobody runs a job: the next one gets new processes."""
    pool = ready(2)
    os.kill(pool.process_ids[1], signal.SIGKILL)
    until = time.monotonic() + QUICK
    while len(pool.process_ids) == 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert [found[0] for found in pool.run(bodies.identity)] == [0, 1]


def test_ranks_that_are_far_from_any_collective(ready: Callable[[int], Pool]) -> None:
    error = failed(ready(2), bodies.never_comes, ProcessFailed)
    assert error.rank == 0 and "KeyError" in str(error) and "is running" in error.waits[1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (bodies.mixed_kinds, ["all_reduce(sum) of float32[2]", "all_gather sending float32[2]"]),
        (bodies.mixed_shapes, ["float32[2]", "float32[3]"]),
        (bodies.mixed_dtypes, ["float32[2]", "int32[2]"]),
        (bodies.mixed_operations, ["all_reduce(sum)", "all_reduce(max)"]),
        (bodies.unexpected_piece, ["sent float32[3] to rank 1, which expects float32[4]"]),
        (bodies.missing_piece, ["rank 0 sent nothing to rank 1, which expects float32[3]"]),
    ],
)
def test_mismatched_collectives_name_both_sides(
    ready: Callable[[int], Pool], body: Callable[..., Any], words: list[str]
) -> None:
    error = failed(ready(2), body, CollectiveMismatch)
    assert all(word in str(error) for word in ["rank 0", "rank 1", *words]), str(error)


def test_wrong_order_is_a_deadlock(ready: Callable[[int], Pool]) -> None:
    error = failed(ready(3), bodies.wrong_order, CollectiveMismatch)
    assert "deadlock" in str(error) and error.waits.keys() == {0, 1, 2}
    assert "group (0, 1), waiting for rank 1 (in op0 at model.py:0)" in error.waits[0]
    assert "group (0, 1, 2), waiting for rank 0" in error.waits[1]


def test_a_rank_that_leaves_early_is_a_deadlock(ready: Callable[[int], Pool]) -> None:
    error = failed(ready(2), bodies.leaves_early, CollectiveMismatch)
    assert "deadlock" in str(error) and error.waits[1] == "has ended"


def test_a_slow_rank_is_a_timeout(ready: Callable[[int], Pool]) -> None:
    error = failed(ready(2), bodies.is_slow, CollectiveMismatch, timeout=0.5)
    assert "rank 1 waited 0.5 s" in str(error) and error.waits[0].startswith("is running")


def test_a_foreign_group_is_refused(ready: Callable[[int], Pool]) -> None:
    assert "which it is not in" in str(failed(ready(2), bodies.foreign_group, CollectiveMismatch))


LAUNCHER = """
import sys
from weft.runtime.jobs.launch import Pool
if __name__ == "__main__":
    with Pool(2) as pool:
        pool.start()
        print(*pool.process_ids, flush=True)
        pool.run("tests.processes.bodies:is_slow")
"""


@pytest.mark.parametrize("signal_number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.full)])
def test_the_launcher_ends_and_takes_its_processes_along(tmp_path: Path, signal_number: int) -> None:
    """Ctrl-C ends cleanly; and if the launcher is killed the processes notice."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    launcher = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert launcher.stdout is not None
    with launcher:
        ids = [int(word) for word in launcher.stdout.readline().split()]
        time.sleep(1.0)
        launcher.send_signal(signal_number)
        launcher.wait(QUICK)
    assert len(ids) == 2 and launcher.returncode != 0
    until = time.monotonic() + QUICK
    while any(map(_is_alive, ids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(_is_alive, ids))

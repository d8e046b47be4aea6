"""Messages between processes, a pipeline on them, and a rank that dies in the middle of a step."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.acceptance.test_pipelines import equal_to_one_device
from tests.processes import bodies
from tests.processes.conftest import Pools
from tests.processes.test_failures import failed
from tests.runtime.test_pipeline import batches, write_pipeline
from weft.runtime.jobs.launch import ProcessFailed
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import CollectiveMismatch
from weft.runtime.watch.states import is_deadlock


@pytest.fixture(params=["pipes", "backend"])
def ways(request: pytest.FixtureRequest) -> Pools:
    """Pools of processes of one host, and of processes that talk as those of different hosts do."""
    found: Pools = request.getfixturevalue("pools" if request.param == "pipes" else "far_pools")
    return found


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_more_letters_than_fit(ways: Pools, num_ranks: int) -> None:
    expected = run_ranks(num_ranks, lambda transport: bodies.many_letters(transport, None))
    for ours, theirs in zip(ways(num_ranks).run(bodies.many_letters), expected, strict=True):
        assert len(ours) == bodies.MESSAGES * num_ranks
        assert all(map(torch.equal, ours, theirs))


def test_a_letter_that_did_not_fit_goes_on_while_its_writer_waits(ways: Pools) -> None:
    found = ways(2).run(bodies.a_letter_that_does_not_fit, timeout=20)
    assert [one.item() for (one,) in found] == [2.0, bodies.MESSAGES - 1.0]


def test_letters_of_a_rank_that_is_done_arrive(ways: Pools) -> None:
    assert torch.cat(ways(2).run(bodies.writes_and_leaves, timeout=20)[1]).tolist() == list(range(bodies.MESSAGES))


def test_letters_of_all_kinds(ways: Pools) -> None:
    expected = run_ranks(2, lambda transport: bodies.letters_of_all_kinds(transport, None))
    for ours, theirs in zip(ways(2).run(bodies.letters_of_all_kinds), expected, strict=True):
        assert [one.dtype for one in ours] == [one.dtype for one in theirs]
        assert all(map(torch.equal, ours, theirs))


def test_a_rank_killed_in_mid_step(ways: Pools) -> None:
    """All others end at once, and say which rank died in which event, and what they waited for."""
    pool = ways(3)
    pool.run(bodies.identity)
    error = failed(pool, bodies.is_killed_in_an_event, ProcessFailed)
    assert "rank 1 failed in step 3 in F2 of blocks.1" in str(error) and "SIGKILL" in str(error)
    for rank in (0, 2):
        assert "gradient of x for blocks.1, micro-batch 2" in error.waits[rank]
        assert "rank 1" in error.waits[rank]
        assert "B2 of blocks.0" in error.waits[rank]


def test_a_rank_killed_in_a_pipeline(ways: Pools, tmp_path: Path) -> None:
    """The same in a real step: the first stage waits for the gradient of a micro-batch that the second never ran."""
    folder, _ = write_pipeline(tmp_path)
    pool = ways(2)
    pool.run(bodies.identity)
    error = failed(
        pool, bodies.is_killed_in_a_pipeline, ProcessFailed, payload={"folder": folder, "batches": batches()}
    )
    assert "rank 1 failed in step 3 in F2 of down" in str(error) and "SIGKILL" in str(error)
    assert "B2 of up" in error.waits[0] and "wait for gradient of" in error.waits[0]
    assert "micro-batch 2" in error.waits[0] and "waiting for rank 1" in error.waits[0]


def test_who_waited_for_what_from_a_rank_that_is_gone(ways: Pools, tmp_path: Path) -> None:
    pool = ways(2)
    pool.run(bodies.identity)
    failed(pool, bodies.tells_what_it_lost, ProcessFailed, payload=str(tmp_path / "error"))
    text = (tmp_path / "error").read_text()
    assert "gone" in text
    assert "rank 0 waited for gradient of x, micro-batch 2 from rank 1 (in B2 of blocks.0)" in text


def test_who_was_in_which_sum_with_a_rank_that_is_gone(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(bodies.identity)
    failed(pools(2), bodies.sums_with_one_that_goes, ProcessFailed, payload=str(tmp_path / "error"))
    text = (tmp_path / "error").read_text()
    assert "rank 1 has gone; rank 0 was in all_reduce(sum) of float32[3]" in text and "in B2 of blocks.0" in text


def test_a_letter_that_does_not_come_in_time(ways: Pools) -> None:
    pool = ways(2)
    pool.run(bodies.identity)
    error = failed(pool, bodies.waits_for_a_slow_letter, CollectiveMismatch, timeout=1.5)
    assert "rank 0 waited 1.5 s for gradient of x, micro-batch 3 from rank 1" in str(error)
    assert "F3 of blocks.1" in error.waits[1] and "waiting for rank 1 (in B3 of blocks.0" in error.waits[0]


def test_a_letter_under_way_is_no_deadlock() -> None:
    """Both ranks wait, one for a message: whether more were posted than have come tells."""
    waits = {"state": "blocked", "calls": [["main (1, 0) messages", 3, [1, 0], "wait"]]}
    meets = {"state": "blocked", "calls": [["main (0, 1)", 0, [0, 1], "barrier"]]}
    for posted, expected in ((3, True), (4, False)):
        states = {
            0: {**meets, "counts": {"main (0, 1)": 1, "main (1, 0) messages": posted}},
            1: {**waits, "counts": {"main (1, 0) messages": 4}},
        }
        assert is_deadlock(states, 2) == expected


def test_sample(ways: Pools) -> None:
    equal_to_one_device("gpt.py", "pp=2", "1f1b", 4, ways)


def test_sample_on_four_ranks(pools: Pools) -> None:
    equal_to_one_device("gpt.py", "pp=2,tp=2", "zb-h1", 4, pools)


FILES = ("gpt.py", "models/t5.py", "models/unet.py", "models/mixtral.py")
PLANS = ("pp=2", "pp=4", "pp=2,tp=2", "dp=2,pp=2")


@pytest.mark.full
@pytest.mark.parametrize(("file", "plan"), list(itertools.product(FILES, PLANS)))
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved", "zb-v"])
def test_matrix(file: str, plan: str, schedule: str, pools: Pools) -> None:
    equal_to_one_device(file, plan, schedule, 4, pools)

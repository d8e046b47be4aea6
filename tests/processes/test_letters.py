"""Letters between processes, a pipeline on them, and a rank that dies in the middle of a step."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.acceptance.test_pipelines import equal_to_one_device
from tests.processes import bodies
from tests.processes.conftest import Pools
from tests.processes.test_failures import failed
from weft.runtime.emulator import run_ranks
from weft.runtime.launch import ProcessFailed


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_more_letters_than_fit(pools: Pools, num_ranks: int) -> None:
    expected = run_ranks(num_ranks, lambda transport: bodies.many_letters(transport, None))
    for ours, theirs in zip(pools(num_ranks).run(bodies.many_letters), expected, strict=True):
        assert len(ours) == bodies.LETTERS * num_ranks
        assert all(map(torch.equal, ours, theirs))


def test_a_letter_that_did_not_fit_goes_on_while_its_writer_waits(pools: Pools) -> None:
    found = pools(2).run(bodies.a_letter_that_does_not_fit, timeout=20)
    assert [one.item() for (one,) in found] == [2.0, bodies.LETTERS - 1.0]


def test_letters_of_a_rank_that_is_done_arrive(pools: Pools) -> None:
    assert torch.cat(pools(2).run(bodies.writes_and_leaves, timeout=20)[1]).tolist() == list(range(bodies.LETTERS))


def test_letters_of_all_kinds(pools: Pools) -> None:
    expected = run_ranks(2, lambda transport: bodies.letters_of_all_kinds(transport, None))
    for ours, theirs in zip(pools(2).run(bodies.letters_of_all_kinds), expected, strict=True):
        assert [one.dtype for one in ours] == [one.dtype for one in theirs]
        assert all(map(torch.equal, ours, theirs))


def test_a_rank_killed_in_mid_step(pools: Pools) -> None:
    """All others end at once, and say which rank died in which event, and what they waited for."""
    pool = pools(3)
    pool.run(bodies.identity)
    error = failed(pool, bodies.is_killed_in_an_event, ProcessFailed)
    assert "rank 1 failed in step 3 in F2 of blocks.1" in str(error) and "SIGKILL" in str(error)
    for rank in (0, 2):
        assert "gradient of x for blocks.1, micro-batch 2" in error.waits[rank]
        assert "rank 1" in error.waits[rank]
        assert "B2 of blocks.0" in error.waits[rank]


def test_sample(pools: Pools) -> None:
    equal_to_one_device("gpt.py", "pp=2", "1f1b", 4, pools)


FILES = ("gpt.py", "models/t5.py", "models/unet.py", "models/mixtral.py")
PLANS = ("pp=2", "pp=4", "pp=2,tp=2", "dp=2,pp=2")


@pytest.mark.full
@pytest.mark.parametrize(("file", "plan"), list(itertools.product(FILES, PLANS)))
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_matrix(file: str, plan: str, schedule: str, pools: Pools) -> None:
    equal_to_one_device(file, plan, schedule, 4, pools)

"""Collectives that never end: the job does, a few seconds after its limit, and says which call it was and who lacks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.devices import never
from tests.pools import Pools
from tests.processes import bodies
from tests.train.test_disagree import made
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.transport import CollectiveMismatch

LATE = 5.0
"""Seconds after the limit."""


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


@pytest.mark.parametrize("on_device", [False, True], ids=["gloo", "device"])
@pytest.mark.parametrize("what", ["training", "evaluation"])
def test_a_rank_that_leaves_out_a_step(pools: Pools, what: str, on_device: bool) -> None:
    error = told(pools(2), never.leaves_out, (*made("tp=2"), what, on_device))
    assert error.first.startswith("rank 0 waited 2 s for all_")
    assert error.first.endswith("of group (0, 1), which rank 1 has not entered")
    assert "waiting for rank 1" in error.waits[0]
    assert error.waits[1].startswith("is running")
    print(error)

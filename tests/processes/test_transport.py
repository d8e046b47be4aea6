"""Collectives between processes: the emulator's results, bit for bit, for every dtype, shape and group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.processes import bodies
from tests.processes.conftest import Pools
from weft.runtime.jobs.launch import Pool, entry_name
from weft.runtime.links.backend import GLOO
from weft.runtime.links.channel import Channel
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import PeerLost
from weft.verify.ranks import same_bits


def check_like_emulator(pool: Pool, body: Callable[..., Any]) -> list[Any]:
    found = pool.run(body)
    wanted = run_ranks(pool.num_ranks, lambda transport: body(transport, None))
    ours, theirs = tree_leaves(found), tree_leaves(wanted)
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and same_bits(a, b)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_collective_is_the_emulators(pools: Pools, num_ranks: int) -> None:
    check_like_emulator(pools(num_ranks), bodies.everything)


def test_uneven_pieces_of_mixed_dtypes(pools: Pools) -> None:
    found = check_like_emulator(pools(4), bodies.uneven)
    assert [tuple(piece.shape) for piece in found[3][2]] == [(2, 1), (2, 2), (2, 3)]


def test_disjoint_ranks(pools: Pools) -> None:
    found = check_like_emulator(pools(4), bodies.disjoint)
    assert not found[0] and torch.equal(found[3][1][0], bodies.values(1, torch.float64, (3, 2)))


def test_a_communicator_keeps_its_order(pools: Pools) -> None:
    assert [[part.tolist() for part in found] for found in check_like_emulator(pools(3), bodies.positions)] == [
        [[0.0, 1.0], [], [0.0]]
    ] * 3


def test_groups_need_no_common_history(pools: Pools) -> None:
    found = pools(4).run(bodies.many_groups)
    assert [[int(x) for x in one] for one in found] == [[1, 2, 4, 4], [1, 3, 4, 4], [5, 2, 3, 4], [5, 4, 4]]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_begun_early(pools: Pools, num_ranks: int) -> None:
    found = pools(num_ranks).run(bodies.aside)
    for *totals, between in found:
        for total, size in zip(totals, bodies.SIZES, strict=True):
            assert torch.equal(total, in_order([bodies.values(r, torch.float64, (size,)) for r in range(num_ranks)]))
        assert between == sum(range(num_ranks))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_long_sums(pools: Pools, num_ranks: int) -> None:
    assert pools(num_ranks).run(bodies.long_sums) == [[True] * 3] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_totals_last_as_long_as_they_are_held(pools: Pools, num_ranks: int) -> None:
    assert pools(num_ranks).run(bodies.kept) == [[True] * 4] * num_ranks


def test_reduce_scatter(pools: Pools) -> None:
    for rank, found in enumerate(pools(4).run(bodies.scattered)):
        assert torch.equal(found, in_order([bodies.values(r, torch.float64, (rank + 1, 2)) for r in range(4)]))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_messages_in_shared_memory(pools: Pools, num_ranks: int) -> None:
    assert all(all(found) for found in pools(num_ranks).run(bodies.boxed))


def test_shared_memory_ends_with_its_job(pools: Pools) -> None:
    pool = pools(2)
    assert [pool.run(bodies.boxes_before) for _ in range(3)][1:] == [[0, 0], [0, 0]]


def test_what_was_sent_last_is_still_there() -> None:
    with Pool(2) as pool:
        assert pool.run(bodies.last_message) == [True, True]


def test_unchecked_calls(pools: Pools) -> None:
    wanted = in_order([bodies.values(r, torch.float32, (9,)) for r in range(2)])
    assert all(torch.equal(found, wanted) for found in pools(2).run(bodies.unchecked))


class Late:
    """Work of a backend that ends, well or not, just after a look at it has timed out."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.looks = fails, 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self.looks += 1
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.fails:
            raise RuntimeError("Connection closed by peer. This is typically caused by a crash")

    def is_completed(self) -> bool:
        return True


def test_work_that_ends_between_two_looks() -> None:
    groups = SimpleNamespace(rank=0, backend=GLOO)
    channel = Channel(groups, SimpleNamespace(watch=None), torch.device("cpu"), lane="main", check=False)  # type: ignore[arg-type]
    work = Late(fails=False)
    channel.wait(work)
    assert work.looks == 2
    with pytest.raises(PeerLost, match=r"^Connection closed by peer\n  try: "):
        channel.wait(Late(fails=True))


def in_order(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def test_jobs_share_processes_and_payloads_arrive(pools: Pools) -> None:
    pool = pools(2)
    first = pool.run(bodies.identity, {"x": torch.ones(2)})
    second = pool.run("tests.processes.bodies:identity", each=["a", "b"])
    assert [found[:2] for found in first] == [found[:2] for found in second]
    assert [found[1] for found in first] == pool.process_ids
    assert [found[2] for found in second] == ["a", "b"] and torch.equal(first[1][2]["x"], torch.ones(2))


def test_a_function_that_no_process_can_find() -> None:
    with pytest.raises(ValueError, match="top of a module"):
        entry_name(lambda transport, payload: None)

"""Gradient synchronisation by itself: plain modules, each rank with its own share of a batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.train.toys import Tower, batch, shares
from weft.runtime.emulator import run_ranks
from weft.runtime.grad_sync import GradSync, Synced, make_buckets
from weft.runtime.launch import Pool
from weft.runtime.processes import ProcessTransport
from weft.runtime.transport import Transport


def train(transport: Transport, bucket: int, times: int = 1) -> list[Tensor | None]:
    """Gradients of this rank after `times` backwards of the mean over all ranks' rows."""
    module = Tower()
    group = tuple(range(transport.num_ranks))
    named = reversed(list(module.named_parameters()))
    GradSync([Synced(n, p, group, transport.num_ranks) for n, p in named], transport, bucket=bucket)
    for _ in range(times):
        module(shares(transport.num_ranks)[transport.rank]).backward()
    return [parameter.grad for parameter in module.parameters()]


def work(transport: ProcessTransport, bucket: int) -> list[Tensor | None]:
    return train(transport, bucket, times=2)


def expected(times: int = 1) -> list[Tensor]:
    module = Tower()
    module(batch()).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad * times for p in module.parameters()]


def check(found: list[list[Tensor | None]], wanted: list[Tensor]) -> None:
    for rank in found:
        for mine, theirs in zip(rank, wanted, strict=True):
            assert mine is not None
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bucket", [1, 400, 1 << 20])
def test_emulated_ranks_get_the_gradients_of_the_whole_batch(bucket: int) -> None:
    check(run_ranks(3, lambda transport: train(transport, bucket)), expected())


def test_gradients_that_were_there_before_are_added_to_once() -> None:
    check(run_ranks(2, lambda transport: train(transport, 400, times=3)), expected(times=3))


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as pool:
        yield pool


@pytest.mark.parametrize("bucket", [1, 400])
def test_processes_sum_while_backward_goes_on(pool: Pool, bucket: int) -> None:
    check(pool.run(work, bucket), expected(times=2))


def test_a_rank_that_does_not_reach_a_parameter_takes_part_with_zeros() -> None:
    def body(transport: Transport) -> list[Tensor]:
        module = nn.ModuleList([nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2, dtype=torch.float64)])
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        sync = GradSync([Synced(n, p, (0, 1)) for n, p in module.named_parameters()], transport)
        assert sync.num_buckets == 1
        module[transport.rank](torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    for rank in run_ranks(2, body):
        assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in rank)


def test_buckets_are_started_where_their_last_parameter_is() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (1, 100, 1, 1, 1)]
    groups = [(0, 1), (0, 1), (0, 2), (0, 1), (0,)]
    synced = [Synced(str(i), p, g) for i, (p, g) in enumerate(zip(parameters, groups, strict=True))]
    names = [[one.name for one in bucket.members] for bucket in make_buckets(synced, 400)]
    assert names == [["1"], ["2"], ["0", "3"]]
    assert [len(bucket.members) for bucket in make_buckets(synced, 4)] == [1, 1, 1, 1]


def test_the_callers_module_is_not_needed_twice() -> None:
    """Each backward starts anew: a second one gives the same sums, not those of both."""
    module = Tower()
    reference = copy.deepcopy(module)

    def body(transport: Transport) -> list[Tensor]:
        mine = copy.deepcopy(module)
        GradSync([Synced(n, p, (0, 1), 2) for n, p in mine.named_parameters()], transport)
        for _ in range(2):
            mine.zero_grad(set_to_none=True)
            mine(shares(2)[transport.rank]).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in mine.parameters()]

    reference(batch()).backward()
    wanted = [torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()]
    check(run_ranks(2, body), wanted)

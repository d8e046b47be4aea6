"""Gradient synchronisation by itself, on a program written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.toys import eager, shares, state, tower
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.buffer_pool import is_private
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.replicas import Replica
from weft.runtime.links.transport import Transport
from weft.runtime.program.module import ParallelModule
from weft.runtime.weights.buckets import in_buckets
from weft.runtime.weights.grad_sync import GradSync, Summed

Gradients = dict[str, Tensor | None]


def bucketed(module: ParallelModule, size: int) -> ParallelModule:
    """Sum gradients in buckets of so many bytes."""
    module.grad_sync = GradSync(module, bucket=size)
    return module


def train(transport: Transport, bucket: int, *, times: int = 1, recompute: bool = False) -> Gradients:
    """Gradients of this rank after some backwards without anything between."""
    module = bucketed(tower(transport.num_ranks, recompute)(transport, state()), bucket)
    for _ in range(times):
        module(shares(transport.num_ranks)[transport.rank]).backward()
    assert len(module.grad_sync.buckets) == {1: 5, 400: 2, 1 << 20: 1}[bucket]
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def check(found: list[Gradients], wanted: dict[str, Tensor]) -> None:
    for rank in found:
        assert rank.keys() == wanted.keys()
        for name, gradient in rank.items():
            assert gradient is not None
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bucket", [1, 400, 1 << 20])
@pytest.mark.parametrize("recompute", [False, True])
def test_ranks_get_the_gradients_of_the_whole_batch(bucket: int, recompute: bool) -> None:
    check(run_ranks(3, lambda transport: train(transport, bucket, recompute=recompute)), eager())


def test_gradients_that_were_there_before_are_added_to_once() -> None:
    check(run_ranks(2, lambda transport: train(transport, 400, times=3)), eager(times=3))


def work(transport: ProcessTransport, payload: dict[str, Any]) -> tuple[Gradients, list[str]]:
    """The gradients, and the order in which sums were started during the first backward."""
    module = bucketed(tower(2, payload["recompute"])(transport, state()), payload["bucket"])
    started: list[str] = []
    plain = transport.start_all_reduce

    def start(parts: Sequence[Tensor], group: tuple[int, ...]) -> Any:
        started.append(transport.doing.what)
        return plain(parts, group)

    transport.start_all_reduce = start  # type: ignore[method-assign]
    for _ in range(3):
        module(shares(2)[transport.rank]).backward()
        transport.start_all_reduce = plain  # type: ignore[method-assign]
    return {name: parameter.grad for name, parameter in module.named_parameters()}, started


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("bucket", [1, 400])
def test_processes_sum_while_backward_goes_on(pool: Pool, bucket: int, recompute: bool) -> None:
    found = pool.run(work, {"bucket": bucket, "recompute": recompute})
    check([gradients for gradients, _ in found], eager(times=3))
    assert found[0][1] == found[1][1]
    names = [text.removeprefix("gradient sync of ").split()[0] for text in found[0][1]]
    order = ["scale", *(f"layers.{i}.weight" for i in (3, 2, 1, 0))]
    assert [order.index(name) for name in names] == sorted(order.index(name) for name in names)


def test_replicas_are_averaged() -> None:
    def body(transport: Transport) -> Gradients:
        replica = Replica(transport, 2)
        module = bucketed(tower(2)(replica, state()), 400)
        # the second replica has a batch of zeros: it adds nothing but its weight
        module(shares(2)[replica.rank] * (replica.number == 0)).backward()
        return {name: parameter.grad for name, parameter in module.named_parameters()}

    wanted = {name: gradient / 2 for name, gradient in eager().items()}
    check(run_ranks(4, body), wanted)


def test_two_forwards_in_one_backward() -> None:
    def body(transport: Transport) -> Gradients:
        module = bucketed(tower(2)(transport, state()), 400)
        x = shares(2)[transport.rank]
        for _ in range(2):
            for parameter in module.parameters():
                parameter.grad = None
            (module(x) + 2 * module(x)).backward()
        return {name: parameter.grad for name, parameter in module.named_parameters()}

    check(run_ranks(2, body), eager(times=3))


def both(transport: ProcessTransport, payload: None) -> Gradients:
    """First one forward per backward, so that arrivals are counted, then two."""
    module = bucketed(tower(2)(transport, state()), 400)
    x = shares(2)[transport.rank]
    module(x).backward()
    (module(x) + module(x)).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def test_what_comes_late_is_summed_too(pool: Pool) -> None:
    check(pool.run(both), eager(times=3))


def test_buckets_are_started_where_their_last_parameter_is() -> None:
    sizes, groups = (1, 100, 1, 1), [(0, 1), (0, 1), (0, 2), (0, 1)]
    summed = [
        Summed(str(i), group, torch.Size((size,)), torch.float32)
        for i, (size, group) in enumerate(zip(sizes, groups, strict=True))
    ]
    names = [[one.name for one in bucket] for bucket in in_buckets(summed, 400)]
    assert names == [["1"], ["2"], ["0", "3"]]
    assert [len(bucket) for bucket in in_buckets(summed, 4)] == [1, 1, 1, 1]


def test_memory_that_others_see_is_not_private() -> None:
    weight, a, b = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(3))
    seen: dict[str, bool] = {}
    for name, parameter in {"weight": weight, "a": a, "b": b}.items():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: seen.update({n: is_private(p.grad)}))
    ((torch.ones(3, 4) @ weight.t()).sum() + (a.view(16) + b.view(16)).sin().sum()).backward()
    # the gradients of a and b are views of one tensor
    assert seen == {"weight": True, "a": False, "b": False}
    whole = torch.ones(4)
    assert is_private(whole) and not is_private(whole[:2])

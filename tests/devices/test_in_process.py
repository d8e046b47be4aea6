"""The backend of devices in one process: what every call gives, and that it is as late and as strict as it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.devices import bodies
from tests.devices.in_process import Recorder, run_ranks
from tests.devices.stream_order import faults, never_waited_for
from tests.processes import bodies as known
from weft.runtime.layout.sharding import Sharding
from weft.runtime.links.emulator import run_ranks as emulated
from weft.runtime.links.transport import RankFailed, Transport

PAIR = (0, 1)


@pytest.mark.parametrize("name", ["everything", "shards", "rows", "sums", "letters"])
def test_every_call_is_the_emulators(name: str) -> None:
    body: Callable[[Transport, Any], Any] = getattr(bodies, name, None) or getattr(known, name)
    recorder = Recorder()
    found = run_ranks(3, lambda transport: body(transport, None), recorder=recorder)
    wanted = emulated(3, lambda transport: body(transport, None))
    assert not faults(recorder.histories) and not never_waited_for(recorder.histories)
    for ours, theirs in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bodies.ROUNDING.get(ours.dtype, 1e-12))


SHARDING = Sharding([(4,)], [((((0, 2),),), (((2, 4),),))], [(2,)], torch.float32)


def test_results_are_not_there_before_they_are_waited_for() -> None:
    def body(transport: Transport) -> list[bool]:
        total, part = torch.ones(4), torch.ones(2)
        handle = transport.start_all_reduce([total.clone()], PAIR)
        gathered = torch.ones(4)
        gathering = transport.start_all_gather([part], SHARDING, PAIR, [gathered])
        transport.meet([(0, 1)])
        before = bool((gathered == 1).all())
        gathering.wait()
        return [before, bool((handle.wait() == 2).all()), bool((gathered == 1).all())]

    assert run_ranks(2, body) == [[True] * 3] * 2


def test_who_reads_too_early_reads_nothing_of_use() -> None:
    def body(transport: Transport) -> bool:
        # whoever gives up a tensor alone in its memory is summed in place
        flat = torch.cat([torch.ones(4)])
        handle = transport.start_all_reduce([flat], PAIR)
        early = flat.clone()
        handle.wait()
        return bool(early.isnan().all()) or not bool((flat == 2).all())

    assert run_ranks(2, body) == [True, True]


CHANGES: dict[str, Callable[[Transport], None]] = {}


def change(body: Callable[[Transport], None]) -> None:
    CHANGES[body.__name__] = body


@change
def shard_before_the_gather_has_ended(transport: Transport) -> None:
    part = torch.ones(2)
    handle = transport.start_all_gather([part], SHARDING, PAIR, [torch.zeros(4)])
    part.add_(1)
    handle.wait()


@change
def sum_that_is_under_way(transport: Transport) -> None:
    flat = torch.cat([torch.ones(4)])
    handle = transport.start_all_reduce([flat], PAIR)
    flat.zero_()
    handle.wait()


@change
def what_is_exchanged(transport: Transport) -> None:
    other, mine = 1 - transport.rank, torch.ones(4)
    handle = transport.start_all_to_all({other: [mine]}, {other: [((4,), mine.dtype)]}, PAIR)
    mine.zero_()
    handle.wait()


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_under_way_may_not_change(name: str) -> None:
    with pytest.raises(RankFailed, match="was written to before it was waited for"):
        run_ranks(2, CHANGES[name])


def test_a_member_that_does_not_come_is_named() -> None:
    def body(transport: Transport) -> None:
        if transport.rank:
            raise ValueError("mine")
        transport.all_reduce(torch.ones(1), PAIR)

    with pytest.raises(RankFailed, match="mine"):
        run_ranks(2, body)

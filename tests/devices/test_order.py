"""Programs on the transport of devices: no order of calls hangs, results that come late change no number, and devices
compute while calls are under way.

Every recipe and schedule, on 2 to 8 ranks. Programs are static, so steps repeat: 100 are run and judged where
`LONG` says so, and each must be the one before; elsewhere 4. A sample runs always, the whole matrix where `full` tests
do.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

from tests.devices.in_process import Recorder
from tests.devices.steps import gpt, recorded
from tests.devices.stream_order import Event, History, faults, never_waited_for, work_between
from weft.order.names import NAMES, named
from weft.runtime.links.device import LANE, DeviceTransport
from weft.runtime.links.transport import Group, Handle
from weft.runtime.weights import tape
from weft.runtime.weights.grad_sync import GradSync

LONG = 4
"""Ranks of the runs of 100 steps."""
FLAT = (
    *("dp=N", "dp=N,recompute", "dp=N,coshard=2", "dp=N,spread", "dp=N,zero=1", "dp=N,zero=2", "dp=N,zero=3"),
    *("dp=N,zero=3,recompute", "dp=N,microbatches=2", "dp=N,zero=2,microbatches=2"),
    *("tp=N", "tp=N,sp", "megatron=N", "megatron=N,sp", "megatron=N,sp,recompute"),
)
"""Recipes for N ranks."""
TWICE = (
    *("dp=2,tp=N", "dp=2,megatron=N,sp", "dp=2,megatron=N,sp,zero=3,recompute", "dp=N,tp=2,zero=2", "dp=N,tp=2,zero=3"),
    *("pp=2,dp=N,microbatches=4", "pp=2,tp=N,microbatches=4", "pp=2,dp=N,zero=2,microbatches=4"),
)
"""Recipes for twice as many."""
TRAINED = [name for name in NAMES if named(name).trains and name != "nf1b"]
"""Schedules; `nf1b` is for models that run again."""


def cases() -> Iterator[tuple[str, int]]:
    """Every recipe and schedule with the steps to run."""
    for ranks in range(2, 9):
        steps = 100 if ranks == LONG else 4
        plans = [recipe.replace("N", str(ranks)) for recipe in FLAT]
        plans += [recipe.replace("N", str(ranks // 2)) for recipe in TWICE if ranks in (4, 6, 8)]
        plans += [f"dp={ranks},zero=2,zero_groups=2"] if ranks in (4, 6, 8) else []
        plans += [f"pp={ranks},microbatches={ranks},schedule={schedule}" for schedule in TRAINED]
        plans += [f"dp=2,tp=2,pp=2,microbatches=4,schedule={schedule}" for schedule in TRAINED if ranks == 8]
        yield from ((plan, steps) for plan in plans)


QUICK = [
    ("dp=2,tp=2", 12),
    ("dp=3,zero=3", 4),
    ("dp=2,megatron=2,sp,zero=3,recompute", 4),
    ("dp=2,pp=2,zero=2,microbatches=4,schedule=zb-v", 4),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in cases())]


def told(step: History) -> list[list[tuple[str, str, int, str]]]:
    """The events of a step, calls counted from its first."""
    first = [Counter[str]() for _ in step]
    for events, known in zip(step, first, strict=True):
        for event in reversed(events):
            known[event.call[0]] = event.call[1]
    return [
        [(event.what, event.call[0], event.call[1] - known[event.call[0]], event.kind) for event in events]
        for events, known in zip(step, first, strict=True)
    ]


@pytest.mark.parametrize(("plan", "steps"), CASES)
def test_no_order_of_calls_hangs(plan: str, steps: int) -> None:
    recorder = recorded(gpt(), plan, steps)
    history = recorder.histories
    assert any(history), "ranks that call nothing show nothing"
    assert not faults(history, shared="collectives")
    assert not never_waited_for(history)
    # the first step makes the ways of messages
    _, second, *others = recorder.by_step()
    assert len(others) == steps - 2
    assert all(told(other) == told(second) for other in others)


class SumsApart(DeviceTransport):
    """Sums of gradients are issued by a thread of their own, as if it were no matter when they come between the
    others."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sums")
        self._random = random.Random(self.rank)

    def _group(self, group: Group, lane: str = LANE) -> tuple[Any, str, Group]:
        # on communicators of their own: the n-th call of one is the n-th on all members
        apart = threading.current_thread().name.startswith("sums")
        return super()._group(group, "sums" if apart else lane)

    def start_all_reduce(self, parts: Sequence[Tensor], group: Group) -> Handle[Tensor]:
        def run() -> Tensor:
            time.sleep(self._random.random() / 500)
            return super(SumsApart, self).start_all_reduce(parts, group).wait()

        future = self._worker.submit(run)

        class Started:
            def wait(self) -> Tensor:
                return future.result()

        return Started()

    def close(self) -> None:
        self._worker.shutdown()
        super().close()


@pytest.mark.parametrize("steps", [10, pytest.param(100, marks=pytest.mark.full)])
def test_sums_on_a_thread_of_their_own_would_hang(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # sums one by one: the model has less than a bucket
    monkeypatch.setitem(GradSync.__init__.__kwdefaults__, "bucket", 0)
    threaded = recorded(gpt(), "dp=2,tp=2", steps, kind=SumsApart).by_step()
    found = [faults(step) for step in threaded]
    assert sum(map(bool, found)) > steps / 2, found
    assert all(one[0].startswith("a cycle: ") for one in found if one)
    assert not any(faults(step) for step in recorded(gpt(), "dp=2,tp=2", steps).by_step())


def work(recorder: Recorder, kind: str) -> list[int]:
    """Products between issue and wait, for each call of a kind of the first rank in the second step."""
    events: Sequence[Event] = recorder.by_step()[1][0]
    return [products for found, products in work_between(events).values() if found == kind]


def test_devices_compute_while_weights_come() -> None:
    """A block's weights are issued before the work of the block before."""
    gathers = work(recorded(gpt(4), "dp=2,zero=3", 2, counted=True), "all_gather")
    # forward and backward: of a block, of the next while the first computes, ...
    first, *others = gathers[: len(gathers) // 2]
    assert not first and all(others), gathers
    first, *others = gathers[len(gathers) // 2 :]
    assert not first and all(others), gathers


@pytest.mark.parametrize("plan", ["dp=2,zero=2", "dp=2,zero=3"])
def test_devices_compute_while_gradients_are_reduced_to_their_owners(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # all of this model's weights are less than one mark
    monkeypatch.setattr(tape, "MARKED", 0)
    *others, last = work(recorded(gpt(4), plan, 2, counted=True), "reduce_scatter")
    assert not last and len(others) == 3 and all(others), others


def test_devices_compute_while_gradients_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GradSync.__init__.__kwdefaults__, "bucket", 8 << 10)
    found = work(recorded(gpt(4), "dp=2", 2, counted=True), "all_reduce(sum)")
    # beside them the loss is summed, and what is used last in backward comes last
    assert sum(map(bool, found)) >= 4, found

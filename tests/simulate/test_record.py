"""Traces of ranks: what is noted on fake tensors is what a rank does, whatever is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models import GPT, GPTConfig
from weft.compile import Compiled, compile_subject
from weft.compile.model_file import Subject
from weft.runtime.checks.ledger import Ledger
from weft.runtime.links.emulator import run_ranks
from weft.runtime.training.pipeline import Event as Phase
from weft.simulate import record as recording
from weft.simulate.record import Recorder, record
from weft.simulate.repeat import micros_to_run
from weft.simulate.trace import BACKWARD, Event, Hold, Issue, Place, Post, Run, Take, Wait
from weft.train.loop import optimizer_of
from weft.train.memory.expected import alike_ranks, expect_rank
from weft.train.opened import open_module

PIPELINES = (
    "pp=2,microbatches=8",
    "pp=2,microbatches=8,schedule=zb-h1",
    "pp=2,microbatches=8,schedule=gpipe",
    "pp=4,tp=2,microbatches=8",
    "pp=2,microbatches=8,schedule=interleaved",
    "pp=2,dp=2,zero=2,microbatches=8",
)
FULL = [pytest.param(one, marks=pytest.mark.full) for one in PIPELINES[2:]]
FLAT = ("dp=1", "dp=2", "tp=2", "dp=2,zero=1", "dp=2,zero=3", "dp=2,tp=2,sp", "dp=2,recompute", "dp=2,coshard=2")


def test_a_question_for_a_device_is_answered_at_once() -> None:
    events: list[Event] = []
    with FakeTensorMode():
        fake = torch.empty(2, device="cuda"), torch.empty(2, device="cpu")
        with Recorder(events):
            found = [one.device.type for one in fake]
    assert found == ["cuda", "cpu"]
    assert not events


def subject(rows: int = 8, layers: int = 4) -> Subject:
    torch.manual_seed(0)
    tokens = torch.randint(32, (rows, 17))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Subject(GPT(GPTConfig(n_layer=layers, dropout=0.0)), batch)


def compiled(plan: str, batch: int = 8) -> tuple[Compiled, Subject]:
    made = subject(batch)
    return compile_subject(made, plan), made


def shown(events: Any) -> list[Any]:
    """Events without their places and without memory."""
    found: list[Any] = []
    for event in events:
        match event:
            case Run():
                found.append((event.kernel.key, event.place.phase))
            case Issue():
                found.append((event.kind, event.group, event.bytes))
            case Wait():
                found.append("wait")
            case Post() | Take():
                found.append((type(event).__name__, event.peer, event.tag, event.bytes))
    return found


def peak(events: Any) -> int:
    now = most = 0
    for event in events:
        if isinstance(event, Hold):
            now += event.bytes
            most = max(most, now)
    return most


@pytest.mark.parametrize("plan", [*PIPELINES[:2], *FULL])
def test_micro_batches_that_are_copied_are_as_if_run(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, model = compiled(plan, 16)
    copied = record(made, model, by_block=False)
    monkeypatch.setattr(recording, "repeat", lambda rank, events: None)
    for one, other in zip(copied, record(made, model, by_block=False), strict=True):
        assert one.alike == other.alike
        assert shown(one.events) == shown(other.events)
        assert peak(one.events) == peak(other.events)


@pytest.mark.parametrize("plan", [*FLAT[1::2], *PIPELINES[1:2], *FULL])
def test_the_peak_is_that_of_expected_memory(plan: str) -> None:
    made, model = compiled(plan, 16)
    for one in record(made, model, by_block=False):
        assert sum(one.state.values()) + peak(one.events) == expect_rank(made.files, model, one.rank).peak


class Heard(Recorder):
    """Notes the kernels of true tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = Ledger.__torch_dispatch__(self, func, types, args, kwargs)
        kernel = recording.kernel_of(func, args, kwargs or {}, result)
        if kernel is not None:
            self.events.append(Run(kernel, Place(BACKWARD)))
        return result


@pytest.mark.parametrize("plan", FLAT[:1] + FLAT[3:4] + FLAT[5:])
def test_kernels_are_those_of_a_true_step(plan: str) -> None:
    """Products and attention, those that take time, on every rank of the emulator; what carries collectives is not
    listed apart there."""
    made, model = compiled(plan)

    def body(transport: Any) -> list[Event]:
        module = open_module(made.files, transport, None)
        optimizer = optimizer_of(model, module)
        for _ in range(2):
            module.train_step(model.example, optimizer)
        heard: list[Event] = []
        with Heard(heard):
            module.train_step(model.example, optimizer)
        return heard

    told = run_ranks(made.devices, body)
    for one in record(made, model, by_block=False):
        for rank in one.alike:
            assert products(one.events) == products(told[rank])


def products(events: Any) -> list[str]:
    return sorted(event.kernel.key for event in events if isinstance(event, Run) and event.kernel.flops)


def test_lines_are_the_users() -> None:
    made, model = compiled("tp=2")
    (trace,) = record(made, model, by_block=True)
    runs = [event for event in trace.events if isinstance(event, Run) and event.kernel.flops]
    assert all("models.py:" in event.place.line for event in runs)
    assert {event.place.phase for event in runs} == {"forward", "backward"}


@pytest.mark.parametrize("plan", ["dp=3,tp=2", "pp=2,dp=3,microbatches=2", "dp=2,tp=3"])
def test_ranks_of_other_shapes_are_kinds_of_their_own(plan: str) -> None:
    made, _ = compiled(plan, 8)
    assert made.pieces is not None
    kinds = alike_ranks(made)
    assert sorted(rank for each in kinds for rank in each) == list(range(made.devices))

    def shapes(rank: int) -> list[Any]:
        found: list[Any] = []
        for one in made.pieces.sizes if made.pieces is not None else ():
            for part in one.parts:
                devices = part.piece.segment.devices
                at = devices.index(rank) if rank in devices else -1
                layouts = [*part.program.stored.values(), *(value.layout for value in part.program.values.values())]
                found.append([[each.shape for each in layout.parts_on(at)] for layout in layouts])
        return found

    for each in kinds:
        assert all(shapes(rank) == shapes(each[0]) for rank in each)
    firsts = [shapes(each[0]) for each in kinds]
    assert all(one not in firsts[:number] for number, one in enumerate(firsts))


def test_what_comes_before_its_model_is_run() -> None:
    """Backwards in the other order: nothing is copied."""
    forwards = [Phase("f", "p", micro) for micro in range(8)]
    backwards = [Phase("b", "p", micro) for micro in reversed(range(8))]
    assert micros_to_run([*forwards, *backwards]) is None
    assert micros_to_run([*forwards, *reversed(backwards)]) == (0, 1, 2, 7)

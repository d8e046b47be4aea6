"""Which communicators there are: all are made when a program is opened, in one order, few for each rank, with names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, HashStore

import weft
from tests.devices import in_process
from tests.devices.in_process import run_ranks
from tests.models import GPT, GPTConfig
from tests.train.eager import adamw
from weft.capture.example import split_example
from weft.compile import compile_subject
from weft.compile.model_file import Subject
from weft.compile.programs import Programs
from weft.runtime.links.backend import BACKENDS, Backend
from weft.runtime.links.device import DeviceTransport
from weft.runtime.links.groups import Groups
from weft.runtime.links.replicas import Replica
from weft.runtime.links.transport import Transport
from weft.runtime.program.files import files_of
from weft.runtime.program.surface import surface_of
from weft.runtime.training.flow import open_trained
from weft.train.opened import open_rank

MOST = 64
SECONDS = 20.0
"""To open a rank of 1,024."""


@dataclass(frozen=True)
class Fake(Backend):
    """torch's fake process group: nothing is sent."""

    names: list[str] = field(default_factory=list)

    def make_group(self, store: Any, position: int, size: int, links: Any, *, name: str, **settings: Any) -> Any:
        self.names.append(name)
        return FakeProcessGroup._create_internal(position, size)


@cache
def files(plan: str, rows: int) -> Any:
    torch.manual_seed(0)
    ids = torch.randint(32, (rows, 8))
    model = GPT(GPTConfig(n_layer=4, n_head=8, n_embd=32, dropout=0.0))
    return files_of(compile_subject(Subject(model, (ids, ids)), plan).files)


def opened(program: Any, rank: int) -> list[str]:
    """The names of the communicators that a rank makes when it opens its share of a program."""
    backend, store = Fake("fake", "cpu", host_waits=False), HashStore()
    transport = DeviceTransport(
        store, Groups(store, rank, backend, local=True), program.devices, device=torch.device("cpu")
    )
    open_trained(program, Replica(transport, program.devices), None)
    transport.close()
    return backend.names


def check_few(plan: str, rows: int, ranks: Sequence[int]) -> None:
    program = files(plan, rows)
    for rank in ranks:
        # the processor's: one that is shared counts for less
        start = time.process_time()
        names = opened(program, rank)
        took = time.process_time() - start
        assert len(names) == len(set(names)) <= MOST
        assert took < SECONDS, plan


@pytest.mark.parametrize("plan", ["dp=8,tp=4,pp=4,microbatches=4", "dp=128", "dp=16,tp=8,zero=3"])
def test_a_rank_of_128_makes_few(plan: str) -> None:
    check_few(plan, 128, [0, 1, 63, 127])


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp=32,tp=8,pp=4,microbatches=4", "dp=1024", "dp=128,tp=8,zero=3"])
def test_a_rank_of_1024_makes_few(plan: str) -> None:
    check_few(plan, 1024, [0, 1, 511, 800, 1023])


@pytest.mark.parametrize(
    ("plan", "replicas"),
    [
        ("dp=2,tp=2", 1),
        ("dp=2,tp=2", 2),
        ("dp=2,zero=3", 2),
        ("dp=2,tp=2,megatron,sp,zero=1", 1),
        ("pp=2,microbatches=2", 2),
        ("dp=2,pp=2,microbatches=4,schedule=interleaved", 1),
        ("dp=2,spread", 1),
    ],
)
def test_none_is_made_in_a_step(plan: str, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ids = torch.randint(32, (8, 8))
    model = GPT(GPTConfig(n_layer=4, n_head=8, n_embd=32, dropout=0.0)).double()
    example = (ids, ids)
    programs = Programs(lambda module: Subject(model, example), plan, None, cache=None, outputs="loss")
    program = programs.training(model)
    surface = surface_of(model, lambda: model, split_example(example))
    made: dict[int, list[str]] = {}
    real = in_process.InProcess.make_group

    def make(self: Any, store: Any, position: int, size: int, links: Any, *, name: str, **settings: Any) -> Any:
        made.setdefault(self.rank, []).append(name)
        return real(self, store, position, size, links, name=name, **settings)

    monkeypatch.setattr(in_process.InProcess, "make_group", make)

    def body(transport: Transport) -> list[str]:
        parallel = open_rank(program, transport, model, surface=surface, make_files=programs)
        before = list(made[transport.rank])
        assert before
        optimizer = adamw(parallel)
        own = ids.roll(parallel.replica, 1)
        for _ in range(2):
            parallel.train_step((own, own), optimizer, prepare=lambda: weft.clip_grad_norm_(parallel.parameters(), 1.0))
        parallel.full_state_dict()
        parallel.eval()
        with torch.no_grad():
            parallel(own, own)
        return made[transport.rank][len(before) :]

    found: list[list[str]] = run_ranks(files_of(program).devices * replicas, body)
    assert not any(found), found


def test_backends_of_devices_are_told_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL would be: what it is given, by a group of torch's that takes the same calls."""
    told: list[Any] = []

    class StandIn:
        class Options:
            pass

        def __new__(cls, store: Any, position: int, size: int, options: Any) -> Any:
            told.append(options)
            return FakeProcessGroup._create_internal(position, size)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
    settings: dict[str, Any] = {"ranks": (3, 5), "name": "weft device: ranks 3,5", "device": torch.device("cpu")}
    made = BACKENDS["nccl"].make_group(HashStore(), 1, 2, (), **settings)
    assert isinstance(made, FakeProcessGroup) and made.rank() == 1
    assert told[0].group_name == "weft device: ranks 3,5" and told[0].global_ranks_in_group == [3, 5]

"""Training steps of a program on the transport of devices in one process, written down step by step."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch

from tests.devices.in_process import Recorder, run_ranks
from tests.models import GPT, GPTConfig
from weft.compile import compile_subject
from weft.compile.model_file import Subject
from weft.runtime.links.device import DeviceTransport
from weft.runtime.links.transport import Transport
from weft.runtime.program.files import files_of
from weft.verify.generated import _make_task, _Rank


@cache
def gpt(layers: int = 2) -> Subject:
    """A small model that eight ranks can share in any way."""
    torch.manual_seed(0)
    ids = torch.randint(32, (16, 8))
    return Subject(GPT(GPTConfig(n_layer=layers, n_head=8, dropout=0.0)), (ids, ids))


def recorded(
    subject: Subject,
    plan: str,
    steps: int,
    *,
    kind: type[DeviceTransport] = DeviceTransport,
    counted: bool = False,
) -> Recorder:
    """What all ranks issue and wait for in so many steps.

    Args:
        counted: how much they compute too.
    """
    compiled = compile_subject(subject, plan)
    files = files_of(compiled.files)
    task = _make_task(files, compiled.graph, subject, seed=0, wide=False, reference=None, travels=False)
    recorder = Recorder()

    def body(transport: Transport) -> None:
        rank = _Rank(task, transport, None)
        update = rank._made(subject.optimizer)
        with recorder.counting(transport.rank) if counted else nullcontext():
            for step in range(steps):
                recorder.begin_step(transport.rank)
                for one in rank._held:
                    one.forget()
                rank._step(step % len(task.batches))
                if update is not None:
                    update.step()
            recorder.begin_step(transport.rank)

    run_ranks(files.devices, body, recorder=recorder, kind=kind)
    return recorder

"""Runs a Program twice in the emulator: as it is emitted, and through the text that traces every op, unfolded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.codegen import generate
from weft.compile.model_file import Subject
from weft.compile.subject import whole_tensors
from weft.ir.program import Program
from weft.ops.precision import Float64Mode
from weft.runtime.layout.execute import take
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import Transport
from weft.runtime.program.files import ProgramFiles
from weft.runtime.program.load import load_program
from weft.runtime.random import Stream

STEPS = 2


@dataclass(frozen=True)
class Result:
    """What one rank found: per step the loss, the gradients by name, and buffers after the last."""

    losses: tuple[torch.Tensor, ...]
    gradients: tuple[Mapping[str, torch.Tensor], ...]
    buffers: Mapping[str, torch.Tensor]


def generated(program: Program, subject: Subject, *, traced: bool) -> list[Result]:
    files, graph = ProgramFiles(generate(program, traced=traced)), program.graph
    whole = whole_tensors(graph, subject, wide=True)
    known = {one.names[0]: whole.state[one.tensor] for one in (*graph.parameters, *graph.buffers)}

    def body(transport: Transport) -> Result:
        losses, gradients = [], []
        with Float64Mode():
            stored = load_program(files, transport).stored
            state = {name: take(known[name], index).clone() for name, index in stored.items() if name in known}
            module = load_program(files, transport, state)
            inputs = [whole.inputs[one.tensor] for one in graph.inputs]
            for step in range(STEPS):
                module.zero_grad()
                module.stream = Stream(7, step, 0)
                loss = module(*inputs)
                losses.append(loss.detach().clone())
                if loss.requires_grad:
                    loss.backward()
                gradients.append({name: p.grad.clone() for name, p in module.trained() if p.grad is not None})
        kept = {one.names[0]: module.part(one.names[0]) for one in graph.buffers if one.names[0] in state}
        return Result(tuple(losses), tuple(gradients), kept)

    return run_ranks(program.devices, body)


def same_bits(program: Program, subject: Subject) -> None:
    """Losses, gradients and buffers of every rank are equal bit for bit."""
    ours, theirs = (generated(program, subject, traced=traced) for traced in (False, True))
    for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for step in range(STEPS):
            assert torch.equal(a.losses[step], b.losses[step]), f"loss of rank {rank}: {a.losses} {b.losses}"
            assert a.gradients[step].keys() == b.gradients[step].keys()
            for name, gradient in a.gradients[step].items():
                assert torch.equal(gradient, b.gradients[step][name]), (
                    f"gradient of {name} on rank {rank}: off by {(gradient - b.gradients[step][name]).abs().max()}"
                )
        assert a.buffers.keys() == b.buffers.keys()
        assert all(torch.equal(a.buffers[name], b.buffers[name]) for name in a.buffers)

"""Runs a Program twice in the emulator: by the interpreter of Scripts and through its generated code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.codegen import emit
from weft.ir.program import Program
from weft.lower.script import scripts as write_scripts
from weft.runtime.emulator import run_ranks
from weft.runtime.interpret import Rank
from weft.runtime.program_files import load_program
from weft.runtime.random import Stream
from weft.runtime.script import Script
from weft.runtime.transfers import take
from weft.runtime.transport import Transport
from weft.verify.model_file import Subject
from weft.verify.parallel import whole_tensors
from weft.verify.precision import Float64Mode

STEPS = 2


@dataclass(frozen=True)
class Result:
    """What one rank found: per step the loss, the gradients by name, and buffers after the last."""

    losses: tuple[torch.Tensor, ...]
    gradients: tuple[Mapping[str, torch.Tensor], ...]
    buffers: Mapping[str, torch.Tensor]


def parts_of(whole: Mapping[str, torch.Tensor], mine: Script) -> dict[str, torch.Tensor]:
    """This rank's own copies of its parts."""
    return {
        name: take(tensor, mine.stored[name]).clone(memory_format=torch.contiguous_format)
        for name, tensor in whole.items()
        if name in mine.stored
    }


def interpreted(program: Program, subject: Subject) -> list[Result]:
    whole = whole_tensors(program.graph, subject, wide=True)
    scripts = write_scripts(program)
    graph = program.graph
    names = {one.tensor: one.names[0] for one in (*graph.parameters, *graph.buffers)}
    dtypes = {name: tensor.dtype for name, tensor in graph.tensors.items() if name not in graph.producers}

    def body(transport: Transport) -> Result:
        mine = scripts[transport.rank]
        losses, gradients = [], []
        with Float64Mode():
            state = parts_of(whole.state, mine)
            rank = Rank(mine, transport, state=state, dtypes=dtypes)
            for step in range(STEPS):
                outputs = rank.forward(parts_of(whole.inputs, mine), Stream(7, step, 0))
                losses.append(outputs[str(graph.loss)].clone())
                gradients.append({names[name]: grad.clone() for name, grad in rank.backward().items()})
                state.update(rank.updates())
        kept = {names[one.tensor]: state[one.tensor] for one in graph.buffers if one.tensor in state}
        return Result(tuple(losses), tuple(gradients), kept)

    return run_ranks(program.devices, body)


def generated(program: Program, subject: Subject, directory: Path) -> list[Result]:
    emit(program, directory)
    whole = whole_tensors(program.graph, subject, wide=True)
    scripts = write_scripts(program)
    graph = program.graph
    stored = (*graph.parameters, *graph.buffers)

    def body(transport: Transport) -> Result:
        mine = scripts[transport.rank]
        losses, gradients = [], []
        with Float64Mode():
            parts = parts_of(whole.state, mine)
            state = {one.names[0]: parts[one.tensor] for one in stored if one.tensor in parts}
            module = load_program(directory, transport, state)
            assert set(state) == {one.names[0] for one in stored if one.names[0] in module.stored}
            inputs = [whole.inputs[one.tensor] for one in graph.inputs]
            for step in range(STEPS):
                module.zero_grad()
                module.stream = Stream(7, step, 0)
                loss = module(*inputs)
                losses.append(loss.detach().clone())
                if loss.requires_grad:
                    loss.backward()
                grads = {name: p.grad.clone() for name, p in module.trained() if p.grad is not None}
                gradients.append(grads)
        kept = {one.names[0]: module.part(one.names[0]) for one in graph.buffers if one.names[0] in state}
        return Result(tuple(losses), tuple(gradients), kept)

    return run_ranks(program.devices, body)


def same_bits(program: Program, subject: Subject, directory: Path) -> None:
    """Losses, gradients and buffers of every rank are equal bit for bit."""
    ours, theirs = generated(program, subject, directory), interpreted(program, subject)
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

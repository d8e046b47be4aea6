"""The same two steps through generated code: emitted files, in the emulator or on processes.

In: a directory with a program, as it lies there, and the user's module and example. Out: a Sample with whole tensors,
put together from what the ranks store. Promised: the code that runs is the code in the directory, with the gradient
synchronisation that training uses; each rank keeps nothing but the parts that its program says it stores; where several
ranks store the same element they must agree on it bit for bit, and every disagreement is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from weft.ir.graph import Graph
from weft.runtime.grad_sync import BucketSync
from weft.runtime.launch import Pool
from weft.runtime.module import ParallelModule
from weft.runtime.processes import TIMEOUT, ProcessTransport
from weft.runtime.program_files import load_program, read_meta
from weft.runtime.random import Stream
from weft.runtime.replicas import Replica
from weft.runtime.script import Index
from weft.runtime.transfers import take
from weft.runtime.transport import Transport
from weft.verify.compare import Noise, Sample, noise_in
from weft.verify.model_file import Optimizer, Subject, load_optimizer
from weft.verify.parallel import assemble, emulate, told, whole_tensors
from weft.verify.precision import Float64Mode
from weft.verify.reference import NUM_STEPS
from weft.verify.share import Local


@dataclass(frozen=True)
class Task:
    """What every rank gets.

    Args:
        state: whole parameters and buffers by the reference's names; inputs: the whole batch.
        names: the reference's name for each name of a parameter or buffer.
        trained: in the order of `module.parameters()`.
        noise: per step, what the updates take as zero, by the reference's names; none if empty.
        path, optimizer: the optimizer of a model file is found there, since a function of it cannot travel.
    """

    directory: Path
    state: Mapping[str, torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    names: Mapping[str, str]
    trained: tuple[str, ...]
    noise: tuple[Mapping[str, Noise], ...]
    seed: int
    wide: bool
    path: Path | None = None
    optimizer: Optimizer | None = None


Ran = tuple[Local, Mapping[str, Index]]
"""What a rank computed, and what it stores of each tensor, both by the reference's names."""


def run_generated(
    directory: Path,
    graph: Graph,
    subject: Subject,
    *,
    seed: int,
    wide: bool,
    reference: Sample | None = None,
    pool: Pool | None = None,
    timeout: float = TIMEOUT,
) -> Sample:
    """Train for two steps through the program in a directory: in the emulator, or on the processes of a pool.

    Args:
        graph: of the model as it is now.
        reference: what the eager module computed, whose rounding the updates take as zero; only gradients are read.
    """
    task = _make_task(directory, graph, subject, seed=seed, wide=wide, reference=reference, travels=pool is not None)
    if pool is not None:
        ran: list[Ran] = told(lambda: pool.run(work, task, timeout=timeout))
    else:
        num_ranks = int(read_meta(directory)["devices"])
        ran = emulate(num_ranks, lambda transport: train(task, transport, subject.optimizer))
    shapes = {name: tuple(tensor.shape) for name, tensor in task.state.items()}
    names = dict(zip(task.state, task.state, strict=True))
    return assemble([local for local, _ in ran], [stored for _, stored in ran], shapes, names)


def _make_task(
    directory: Path, graph: Graph, subject: Subject, *, seed: int, wide: bool, reference: Sample | None, travels: bool
) -> Task:
    whole = whole_tensors(graph, subject, wide=wide)
    held: dict[str, tuple[str, ...]] = {one.tensor: one.names for one in graph.parameters}
    held.update({one.tensor: one.names for one in graph.buffers})
    path = subject.path.resolve() if travels and subject.path is not None else None
    return Task(
        directory=directory.resolve(),
        state={name: whole.state[tensor] for tensor, name in whole.names.items()},
        inputs=tuple(whole.inputs[one.tensor] for one in graph.inputs),
        names={each: name for tensor, name in whole.names.items() for each in held[tensor]},
        trained=tuple(whole.names[tensor] for tensor in whole.trained),
        noise=() if reference is None else tuple(map(noise_in, reference.gradients)),
        seed=seed,
        wide=wide,
        path=path,
        optimizer=subject.optimizer if travels and path is None else None,
    )


def work(transport: ProcessTransport, task: Task) -> Ran:
    """What each process does."""
    optimizer = load_optimizer(task.path) if task.path is not None else task.optimizer
    assert optimizer is not None
    return train(task, transport, optimizer, transport.begin_step)


def train(
    task: Task, transport: Transport, optimizer: Optimizer, begin: Callable[[int], None] = lambda step: None
) -> Ran:
    """Two optimizer steps of one rank through its generated module.

    Args:
        begin: is told the number of each step before it.
    """
    with Float64Mode() if task.wide else nullcontext():
        replica = Replica(transport, transport.num_ranks)
        module = load_program(task.directory, replica, grad_sync=BucketSync())
        held = {task.names[name]: name for name in module.stored if module.part(name) is not None}
        stored = {known: module.stored[name] for known, name in held.items()}
        with torch.no_grad():
            for known, name in held.items():
                module.part(name).copy_(take(task.state[known], stored[known]))
        local = _train(module, task, stored, optimizer, begin)
        weights = {known: module.part(name).detach().clone() for known, name in held.items()}
        return replace(local, weights=weights), stored


def _train(
    module: ParallelModule,
    task: Task,
    stored: Mapping[str, Index],
    optimizer: Optimizer,
    begin: Callable[[int], None],
) -> Local:
    trained = {task.names[name]: parameter for name, parameter in module.trained()}
    ordered = [trained[name] for name in task.trained if name in trained]
    update = optimizer(ordered) if ordered else None
    losses, gradients = [], []
    for step in range(NUM_STEPS):
        begin(step + 1)
        for parameter in ordered:
            parameter.grad = None
        module.stream = Stream(task.seed, step, 0)
        # an op may write to its input: each step has its own
        loss: torch.Tensor = module(*(one.clone() for one in task.inputs))
        losses.append(loss.detach().clone())
        loss.backward()
        gradients.append({name: one.grad.clone() for name, one in trained.items() if one.grad is not None})
        noise = task.noise[step] if task.noise else {}
        for name, parameter in trained.items():
            if name in noise and parameter.grad is not None:
                parameter.grad = _part_of(noise[name], stored[name]).silence(parameter.grad)
        if update is not None:
            update.step()
    return Local(losses=tuple(losses), gradients=tuple(gradients), weights={})


def _part_of(noise: Noise, index: Index) -> Noise:
    return Noise(take(noise.where, index), noise.below)

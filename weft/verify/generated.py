"""The same two steps through generated code: emitted files, in the emulator or on processes.

In: a directory with a program, whole or in pieces, as it lies there, and the user's module and example. Out: a Sample
with whole tensors, put together from what the ranks store. Promised: the code that runs is the code in the directory,
with the gradient synchronisation that training uses; each rank keeps nothing but the parts that its program says it
stores; where several ranks (or several pieces of one) store the same element they must agree on it bit for bit, and
every disagreement is reported. A program in pieces runs the micro-batches that it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from weft.ir.graph import Graph
from weft.runtime.grad_sync import BucketSync
from weft.runtime.launch import Pool
from weft.runtime.masters import masters_of, tell_sums, with_masters
from weft.runtime.microbatches import default_dims, split
from weft.runtime.pieces import Pieces
from weft.runtime.pipeline_files import is_pipeline, load_pipeline, pipeline_parts, read_pipeline
from weft.runtime.precision import Mixed
from weft.runtime.processes import TIMEOUT, ProcessTransport
from weft.runtime.program_files import load_program, read_meta
from weft.runtime.random import Stream
from weft.runtime.reduction import reduced
from weft.runtime.replicas import Replica
from weft.runtime.script import Index
from weft.runtime.several import with_empties
from weft.runtime.stored import Holds
from weft.runtime.transfers import take
from weft.runtime.transport import Transport
from weft.verify.compare import Noise, Sample, noise_in
from weft.verify.model_file import Optimizer, Subject, load_optimizer
from weft.verify.parallel import assemble, emulate, told, whole_tensors
from weft.verify.precision import Float64Mode
from weft.verify.reference import NUM_STEPS, shares_of
from weft.verify.share import Local


@dataclass(frozen=True)
class Task:
    """What every rank gets.

    Args:
        state: whole parameters and buffers by the reference's names.
        batches: the inputs of each micro-batch; one if the program is whole.
        shares: what the loss of each counts; size_of: which of the program's sizes each has.
        names: the reference's name for each name of a parameter or buffer.
        trained: in the order of `module.parameters()`.
        noise: per step, what the updates take as zero, by the reference's names; none if empty.
        path, optimizer: the optimizer of a model file is found there, since a function of it cannot travel.
        mixed: how it is trained in another precision than the weights'.
    """

    directory: Path
    state: Mapping[str, torch.Tensor]
    batches: tuple[tuple[torch.Tensor, ...], ...]
    shares: tuple[float, ...]
    size_of: tuple[int, ...]
    names: Mapping[str, str]
    trained: tuple[str, ...]
    noise: tuple[Mapping[str, Noise], ...]
    seed: int
    wide: bool
    path: Path | None = None
    optimizer: Optimizer | None = None
    mixed: Mixed | None = None


Ran = tuple[tuple[Local, Mapping[str, Index]], ...]
"""What each module of a rank computed, and what it stores of each tensor, both by the reference's names."""


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
        meta = read_pipeline(directory) if is_pipeline(directory) else read_meta(directory)
        ran = emulate(int(meta["devices"]), lambda transport: train(task, transport, subject.optimizer))
    shapes = {name: tuple(tensor.shape) for name, tensor in task.state.items()}
    found = [(rank, local, stored) for rank, modules in enumerate(ran) for local, stored in modules]
    return assemble(
        [local for _, local, _ in found],
        [stored for _, _, stored in found],
        shapes,
        {name: name for name in task.state},
        ranks=[rank for rank, _, _ in found],
    )


def _make_task(
    directory: Path, graph: Graph, subject: Subject, *, seed: int, wide: bool, reference: Sample | None, travels: bool
) -> Task:
    whole = whole_tensors(graph, subject, wide=wide)
    held: dict[str, tuple[str, ...]] = {one.tensor: one.names for one in graph.parameters}
    held.update({one.tensor: one.names for one in graph.buffers})
    path = subject.path.resolve() if travels and subject.path is not None else None
    batches, counts, size_of = _cut(directory, subject, [whole.inputs[one.tensor] for one in graph.inputs])
    return Task(
        directory=directory.resolve(),
        state={name: whole.state[tensor] for tensor, name in whole.names.items()},
        batches=tuple(map(tuple, batches)),
        shares=tuple(counts),
        size_of=tuple(size_of),
        names={each: name for tensor, name in whole.names.items() for each in held[tensor]},
        trained=tuple(whole.names[tensor] for tensor in whole.trained),
        noise=() if reference is None else tuple(map(noise_in, reference.gradients)),
        seed=seed,
        wide=wide,
        path=path,
        optimizer=subject.optimizer if travels and path is None else None,
        mixed=None if wide else subject.mixed,
    )


def _cut(
    directory: Path, subject: Subject, inputs: Sequence[torch.Tensor]
) -> tuple[Sequence[Sequence[torch.Tensor]], Sequence[float], Sequence[int]]:
    """The micro-batches that a program runs, what each counts, and which of its sizes each has."""
    size_of = read_pipeline(directory)["size_of"] if is_pipeline(directory) else [0]
    if len(size_of) == 1:
        return [inputs], [1.0], size_of
    dims = read_pipeline(directory)["dims"] or default_dims(inputs)
    return split(inputs, dims, len(size_of)), shares_of(subject, len(size_of), dims), size_of


def work(transport: ProcessTransport, task: Task) -> Ran:
    """What each process does."""
    optimizer = load_optimizer(task.path) if task.path is not None else task.optimizer
    assert optimizer is not None
    return train(task, transport, optimizer, transport.begin_step)


def train(
    task: Task, transport: Transport, optimizer: Optimizer, begin: Callable[[int], object] = lambda step: None
) -> Ran:
    """Two optimizer steps of one rank through its generated modules.

    Args:
        begin: is told the number of each step before it.
    """
    with Float64Mode() if task.wide else nullcontext():
        replica = Replica(transport, transport.num_ranks)
        opened: _Opened = _InPieces(task, replica) if is_pipeline(task.directory) else _Whole(task, replica)
        held = [_Held(module, task) for module in opened.holders]
        for one in held:
            one.fill(task)
        opened.join()
        losses, gradients = _train(opened, held, task, optimizer, begin)
        return tuple(
            (Local(losses, tuple(kept), one.weights()), one.stored) for one, kept in zip(held, gradients, strict=True)
        )


class _Opened(Protocol):
    """A rank's share of a program."""

    @property
    def holders(self) -> Sequence[Holds]:
        """What the optimizer updates, of each module."""

    def join(self) -> None:
        """Make one of what several modules hold alike, as training does."""

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer updates, each once."""

    def step(self, task: Task, step: int) -> torch.Tensor:
        """Forward and backward; the loss."""


class _Whole:
    """A program in one piece."""

    def __init__(self, task: Task, replica: Replica) -> None:
        self._module = load_program(task.directory, replica, grad_sync=BucketSync())
        masters = with_masters(self._module, task.mixed)
        self.holders: tuple[Holds] = (self._module if masters is None else masters,)

    def join(self) -> None:
        return None

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.holders[0].trained()

    def step(self, task: Task, step: int) -> torch.Tensor:
        self._module.stream = Stream(task.seed, step, 0)
        # an op may write to its input: each step has its own
        loss: torch.Tensor = self._module(*(one.clone() for one in task.batches[0]))
        found = loss.detach().clone()
        loss.backward()
        return found


class _InPieces:
    """A program in pieces, run event by event."""

    def __init__(self, task: Task, replica: Replica) -> None:
        self._rank = load_pipeline(task.directory, replica, BucketSync)
        pieces = Pieces(tuple(self._rank.modules), replica, *pipeline_parts(task.directory))
        self._masters = None if task.mixed is None else masters_of(pieces, task.mixed)
        for share in self._rank.sizes:
            tell_sums(share.modules, task.mixed)
        self._pieces: Pieces[Any] = pieces if self._masters is None else self._masters
        self.holders: tuple[Holds, ...] = self._pieces.modules

    def join(self) -> None:
        self._pieces.join_copies()

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._pieces.trained()
        yield from self._pieces.apart()

    def step(self, task: Task, step: int) -> torch.Tensor:
        batches = [[tensor.clone() for tensor in one] for one in task.batches]
        self.join()
        found = self._rank.step(batches, task.shares, task.seed, step, size_of=task.size_of)
        for one in () if self._masters is None else self._masters.modules:
            one.collect()
        return reduced(found, task.shares)


class _Held:
    """What one module stores, by the reference's names."""

    def __init__(self, module: Holds, task: Task) -> None:
        self._module = module
        self._names = {task.names[name]: name for name in module.stored if module.part(name) is not None}
        self.stored = {known: module.stored[name] for known, name in self._names.items()}
        self.trained = {task.names[name]: parameter for name, parameter in module.trained()}

    @torch.no_grad()
    def fill(self, task: Task) -> None:
        for known, name in self._names.items():
            self._module.part(name).copy_(take(task.state[known], self.stored[known]))

    def forget(self) -> None:
        for parameter in self.trained.values():
            parameter.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: one.grad.clone() for name, one in self.trained.items() if one.grad is not None}

    def silence(self, noise: Mapping[str, Noise]) -> None:
        for name, parameter in self.trained.items():
            if name in noise and parameter.grad is not None:
                part = Noise(take(noise[name].where, self.stored[name]), noise[name].below)
                parameter.grad = part.silence(parameter.grad)

    def weights(self) -> dict[str, torch.Tensor]:
        return {known: self._module.part(name).detach().clone() for known, name in self._names.items()}


def _train(
    opened: _Opened, held: Sequence[_Held], task: Task, optimizer: Optimizer, begin: Callable[[int], object]
) -> tuple[tuple[torch.Tensor, ...], list[list[dict[str, torch.Tensor]]]]:
    """The losses, and for each module the gradients of each step."""
    by_name: dict[str, list[nn.Parameter]] = {}
    for name, parameter in opened.trained():
        by_name.setdefault(task.names[name], []).append(parameter)
    ordered = [parameter for name in task.trained for parameter in by_name.get(name, ())]
    dims = {task.state[name].dim() for name in task.trained}
    update = optimizer(with_empties(ordered, dims)) if ordered else None
    losses: list[torch.Tensor] = []
    gradients: list[list[dict[str, torch.Tensor]]] = [[] for _ in held]
    for step in range(NUM_STEPS):
        begin(step + 1)
        for one in held:
            one.forget()
        losses.append(opened.step(task, step))
        for one, kept in zip(held, gradients, strict=True):
            kept.append(one.gradients())
            one.silence(task.noise[step] if task.noise else {})
        if update is not None:
            update.step()
    return tuple(losses), gradients

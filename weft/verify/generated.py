"""The same steps and evaluation through generated code, in the emulator or on processes.

In: the files of a program, whole or in pieces, as they are, and the user's module and example. Out: a Sample with whole
tensors, put together from what the ranks store; and, of a program that was generated to tell it, what every op made in
the forward of the first step. Promised: the code that runs is the code in the files, with the gradient synchronisation
that training uses; each rank keeps nothing but the parts that its program says it stores; where several ranks (or
several pieces of one) store the same element they must agree on it bit for bit, and every disagreement is reported. A
program in pieces runs the micro-batches that it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.capture.example import flatten_output, split_example
from weft.codegen import generate
from weft.compile.model_file import Optimizer, Subject, load_optimizer
from weft.compile.subject import whole_tensors
from weft.ir.graph import Graph
from weft.lower import lower
from weft.ops.precision import Float64Mode, widen
from weft.plan.plan import Plan
from weft.runtime.jobs.launch import Pool
from weft.runtime.layout.execute import take
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.replicas import Replica
from weft.runtime.links.transport import Transport
from weft.runtime.program.files import ProgramFiles, Source, files_of
from weft.runtime.program.load import load_program
from weft.runtime.program.module import ParallelModule
from weft.runtime.program.stored import Holds
from weft.runtime.random import Stream
from weft.runtime.training.combined_optimizer import with_empties
from weft.runtime.training.flow import lend, open_flow, open_trained, take_back
from weft.runtime.training.microbatches import default_dims, split
from weft.runtime.training.pieces import Pieces
from weft.runtime.training.reduction import reduced
from weft.runtime.weights.precision import Mixed
from weft.verify.batches import NUM_STEPS, OTHER_STEP, batches_of
from weft.verify.compare import Noise, Sample, Tensors, noise_in
from weft.verify.ranks import Local, assemble, emulate, told
from weft.verify.reference import Evaluation, shares_of

Batches = tuple[tuple[Tensor, ...], ...]
"""The inputs of micro-batches."""
Record = dict[tuple[str, int, str, int, int], Tensor]
"""What the ops of one rank made: (piece, micro-batch, op, output, slot) -> tensor. A whole program is piece ''."""


@dataclass(frozen=True)
class Task:
    """What every rank gets.

    Args:
        state: whole parameters and buffers by the reference's names.
        batches: for each step the inputs of each micro-batch; one if the program is whole.
        shares: what the loss of each counts; size_of: which of the program's sizes each has.
        evaluation: the program for evaluation, if it is evaluated; evaluated: its micro-batches.
        names: the reference's name for each name of a parameter or buffer.
        trained: in the order of `module.parameters()`.
        noise: per step, what the updates take as zero, by the reference's names; none if empty.
        path, optimizer: the optimizer of a model file is found there, since a function of it cannot travel.
        mixed: how it is trained in another precision than the weights'.
    """

    files: ProgramFiles
    state: Tensors
    batches: tuple[Batches, ...]
    shares: tuple[tuple[float, ...], ...]
    size_of: tuple[int, ...]
    names: Mapping[str, str]
    trained: tuple[str, ...]
    noise: tuple[Mapping[str, Noise], ...]
    seed: int
    wide: bool
    path: Path | None = None
    optimizer: Optimizer | None = None
    mixed: Mixed | None = None
    evaluation: ProgramFiles | None = None
    evaluated: Batches = ()


def run_generated(  # noqa: PLR0913 - each is a fact about the run
    program: Source,
    graph: Graph,
    subject: Subject,
    *,
    seed: int,
    wide: bool,
    reference: Sample | None = None,
    evaluation: Source | None = None,
    pool: Pool | None = None,
    timeout: float | None = None,
) -> Sample:
    """Train through a program on the batches of `batches.py`: in the emulator, or on the processes of a pool.

    Args:
        program: its files, or the directory that holds them.
        graph: of the model as it is now.
        reference: what the eager module computed, whose rounding the updates take as zero; only gradients are read, and
            whether a step was done on other values.
        evaluation: the program for evaluation.
    """
    files = files_of(program)
    task = _make_task(
        files,
        graph,
        subject,
        seed=seed,
        wide=wide,
        reference=reference,
        travels=pool is not None,
        evaluation=None if evaluation is None else files_of(evaluation),
    )
    if pool is not None:
        return _joined(task, told(lambda: pool.run(work, task, timeout=timeout)))
    return _joined(task, emulate(files.devices, lambda transport: train(task, transport, subject.optimizer)))


def run_traced(
    program: Source, graphs: Sequence[Graph], graph: Graph, subject: Subject, *, seed: int, reference: Sample
) -> tuple[Sample, list[Record], Record]:
    """Train in float64, in the emulator, through a program that tells what its ops make.

    Args:
        graphs: of a micro-batch of each size; `graph`: of the whole batch.

    Returns:
        what came of it, what every op made on each rank, and what it makes on one device.
    """
    files = files_of(program)
    task = _make_task(files, graph, subject, seed=seed, wide=True, reference=reference, travels=False)
    records: list[Record] = [{} for _ in range(files.devices)]

    def body(transport: Transport) -> tuple[Local, ...]:
        return train(task, transport, subject.optimizer, record=records[transport.rank])

    sample = _joined(task, emulate(files.devices, body))
    (expected,) = emulate(1, lambda transport: _forwards(task, graphs, transport))
    return sample, records, expected


def _forwards(task: Task, graphs: Sequence[Graph], transport: Transport) -> Record:
    """What every op makes on one device, in the forwards of the first step."""
    found: Record = {}
    with Float64Mode(), torch.no_grad():
        replica = Replica(transport, 1)
        modules = [load_program(generate(lower(Plan(one, devices=1)), traced=True), replica) for one in graphs]
        for module in modules:
            _Held(0, module, task)
            _record(module, "", found)
        for micro, (batch, size) in enumerate(zip(task.batches[0], task.size_of, strict=True)):
            modules[size].stream = Stream(task.seed, 0, micro)
            modules[size](*(one.clone() for one in batch))
            for other in modules:
                if other is not modules[size]:
                    other.take_buffers(modules[size])
    return found


def _record(module: ParallelModule, piece: str, record: Record) -> None:
    """Let a module write down what its ops make in the first step; not again where they run again in backward."""

    def trace(op: str, output: int, slot: int, tensor: Tensor) -> None:
        if module.stream.step == 0:
            record.setdefault((piece, module.stream.microbatch, op, output, slot), tensor.detach().clone())

    module.trace = trace


def _joined(task: Task, ran: Sequence[Sequence[Local]]) -> Sample:
    shapes = {name: tuple(tensor.shape) for name, tensor in task.state.items()}
    return assemble([one for modules in ran for one in modules], shapes)


def _make_task(
    files: ProgramFiles,
    graph: Graph,
    subject: Subject,
    *,
    seed: int,
    wide: bool,
    reference: Sample | None,
    travels: bool,
    evaluation: ProgramFiles | None = None,
) -> Task:
    whole = whole_tensors(graph, subject, wide=wide)
    held = {one.tensor: one.names for one in graph.parameters} | {one.tensor: one.names for one in graph.buffers}
    path = subject.path.resolve() if travels and subject.path is not None else None
    examples = batches_of(subject.example, other=reference is not None and reference.other)
    steps = [_cut(files, replace(subject, example=one), _inputs(graph, one, wide=wide)) for one in examples]
    return Task(
        files=files,
        state={name: whole.state[tensor] for tensor, name in whole.names.items()},
        batches=tuple(batches for batches, _ in steps),
        shares=tuple(counts for _, counts in steps),
        size_of=tuple(files.about["size_of"]),
        names={each: name for tensor, name in whole.names.items() for each in held[tensor]},
        trained=tuple(whole.names[tensor] for tensor in whole.trained),
        noise=() if reference is None else tuple(map(noise_in, reference.gradients)),
        seed=seed,
        wide=wide,
        path=path,
        optimizer=subject.optimizer if travels and path is None else None,
        mixed=None if wide else subject.mixed,
        evaluation=evaluation,
        evaluated=()
        if evaluation is None
        else _cut(evaluation, subject, _inputs(graph, examples[OTHER_STEP], wide=wide))[0],
    )


def _inputs(graph: Graph, example: Any, *, wide: bool) -> list[Tensor]:
    """The tensors of a batch, in the order of the graph."""
    leaves = tree_leaves(split_example(example))
    found = [leaves[one.index].detach() for one in graph.inputs]
    return [widen(one) for one in found] if wide else found


def _cut(files: ProgramFiles, subject: Subject, inputs: Sequence[Tensor]) -> tuple[Batches, tuple[float, ...]]:
    """The micro-batches of a batch that a program runs, and what each counts."""
    count, dims = len(files.about["size_of"]), files.about["dims"]
    if count == 1:
        return (tuple(inputs),), (1.0,)
    batches = split(inputs, dims or default_dims(inputs), count)
    return tuple(map(tuple, batches)), tuple(shares_of(subject, count, dims or default_dims(inputs)))


def evaluated_by(program: Source) -> Evaluation:
    """How a program for evaluation runs a batch."""
    about = files_of(program).about
    return Evaluation(len(about["size_of"]), about.get("output") is not None)


def work(transport: ProcessTransport, task: Task) -> tuple[Local, ...]:
    """What each process does."""
    optimizer = load_optimizer(task.path) if task.path is not None else task.optimizer
    assert optimizer is not None
    return train(task, transport, optimizer, transport.begin_step)


def train(
    task: Task,
    transport: Transport,
    optimizer: Optimizer,
    begin: Callable[[int], object] = lambda step: None,
    record: Record | None = None,
) -> tuple[Local, ...]:
    """The optimizer steps of one rank through its generated modules: what each of them computed.

    Args:
        begin: is told the number of each step before it.
        record: gets what ops make in the first step.
    """
    with Float64Mode() if task.wide else nullcontext():
        return _Rank(task, transport, record).train(optimizer, begin)


class _Rank:
    """A rank's share of a program, with its values."""

    def __init__(self, task: Task, transport: Transport, record: Record | None) -> None:
        self._task, self._replica = task, Replica(transport, transport.num_ranks)
        self._flow, self._programs, self._masters = open_trained(task.files, self._replica, task.mixed)
        self._pieces: Pieces[Any] = self._masters or self._programs
        if record is not None:
            for name, piece in (one for share in self._flow.rank.sizes for one in share.pieces.items()):
                _record(piece.module, name, record)
        self._held = [_Held(transport.rank, module, task) for module in self._pieces.modules]
        # one of what several modules hold alike, as in training
        self._pieces.join_copies()

    def train(self, optimizer: Optimizer, begin: Callable[[int], object]) -> tuple[Local, ...]:
        """All steps, and the evaluation between them: what each module computed."""
        update, losses, gradients = self._made(optimizer), list[Tensor](), list[list[Tensors]]()
        outputs = list[Tensor]()
        for step in range(NUM_STEPS):
            begin(step + 1)
            for one in self._held:
                one.forget()
            losses.append(self._step(step))
            gradients.append([one.gradients() for one in self._held])
            for one in self._held:
                one.silence(self._task.noise[step] if self._task.noise else {})
            if update is not None:
                update.step()
            if step == OTHER_STEP and self._task.evaluation is not None:
                outputs = self._evaluate(self._task.evaluation)
        kept = zip(*gradients, strict=True)
        return tuple(one.local(losses, mine, outputs) for one, mine in zip(self._held, kept, strict=True))

    @torch.no_grad()
    def _evaluate(self, program: ProgramFiles) -> list[Tensor]:
        """What the model returns of each micro-batch, as a parallel module in evaluation runs it."""
        task, flow = self._task, open_flow(program, self._replica)
        stream = Stream(task.seed, OTHER_STEP + 1, 0)
        batches = [[tensor.clone() for tensor in one] for one in task.evaluated]
        if flow.is_whole:
            flow.program.share(self._flow.program)
            flow.program.stream = stream
            found: list[Any] = [flow.program(*batches[0])]
        else:
            lend(self._programs, flow)
            found = flow.rank.forward(batches, stream, size_of=program.about["size_of"])
        take_back(self._programs, flow)
        if flow.output is None:
            return [one if isinstance(one, Tensor) else one[0] for one in found]
        return [leaf.clone() for one in found for leaf in flatten_output(flow.output.build(one))[1]]

    def _made(self, optimizer: Optimizer) -> torch.optim.Optimizer | None:
        """The optimizer, over the parameters in the order of `module.parameters()`; None if there are none."""
        task, by_name = self._task, dict[str, list[nn.Parameter]]()
        apart = [(copy.name, copy.other) for copy in self._pieces.apart.values()]
        for name, parameter in (*self._pieces.trained(), *apart):
            by_name.setdefault(task.names[name], []).append(parameter)
        ordered = [parameter for name in task.trained for parameter in by_name.get(name, ())]
        dims = {task.state[name].dim() for name in task.trained}
        return optimizer(with_empties(ordered, dims)) if ordered else None

    def _step(self, step: int) -> Tensor:
        """Forward and backward; the loss."""
        task = self._task
        # an op may write to its input: each step has its own
        batches = [[tensor.clone() for tensor in one] for one in task.batches[step]]
        if self._flow.is_whole:
            self._flow.program.stream = Stream(task.seed, step, 0)
            loss: Tensor = self._flow.program(*batches[0])
            found = loss.detach().clone()
            loss.backward()
            return found
        self._pieces.join_copies()
        losses = self._flow.rank.step(batches, task.shares[step], task.seed, step, size_of=task.size_of)
        for one in () if self._masters is None else self._masters.modules:
            one.collect()
        return reduced(losses, task.shares[step])


class _Held:
    """What one module stores, by the reference's names; it has the values of the reference."""

    def __init__(self, rank: int, module: Holds, task: Task) -> None:
        self._rank, self._module = rank, module
        self._names = {task.names[name]: name for name in module.stored if module.part(name) is not None}
        self._stored = {known: module.stored[name] for known, name in self._names.items()}
        self._trained = {task.names[name]: parameter for name, parameter in module.trained()}
        with torch.no_grad():
            for known, name in self._names.items():
                module.part(name).copy_(take(task.state[known], self._stored[known]))

    def forget(self) -> None:
        for parameter in self._trained.values():
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        return {name: one.grad.clone() for name, one in self._trained.items() if one.grad is not None}

    def silence(self, noise: Mapping[str, Noise]) -> None:
        for name, parameter in self._trained.items():
            if name in noise and parameter.grad is not None:
                where = take(noise[name].where, self._stored[name]).to(parameter.grad.device)
                part = Noise(where, noise[name].below)
                parameter.grad = part.silence(parameter.grad)

    def local(self, losses: Sequence[Tensor], gradients: Sequence[Tensors], outputs: Sequence[Tensor]) -> Local:
        """What was computed, and the weights as they are now."""
        weights = {known: self._module.part(name).detach().clone() for known, name in self._names.items()}
        return Local(self._rank, tuple(losses), tuple(gradients), weights, self._stored, tuple(outputs))

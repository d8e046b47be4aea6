"""A pipeline against one device: both train on the same micro-batches.

In: a plan in pieces (pieces.py), compiled. Out: a Sample of two steps through the generated pieces, in the emulator or
on the processes of a pool; and the verdict. The reference runs the micro-batches one after the other and counts their
losses by rows; the pipeline runs them in the order of its schedule.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from weft.ir.schedule import row
from weft.ops.coverage import coverage, unruled_warnings
from weft.order import check_schedule, simulate
from weft.runtime.grad_sync import BucketSync
from weft.runtime.launch import Pool
from weft.runtime.module import ParallelModule
from weft.runtime.pipeline import Rank
from weft.runtime.pipeline_files import load_pipeline
from weft.runtime.processes import TIMEOUT, ProcessTransport
from weft.runtime.replicas import Replica
from weft.runtime.script import Index
from weft.runtime.transfers import take
from weft.runtime.transport import Transport
from weft.verify.compare import Noise, Result, Sample, compare, count_silenced, noise_in
from weft.verify.model_file import Optimizer, Subject, load_optimizer
from weft.verify.parallel import assemble, emulate, told, whole_tensors
from weft.verify.pieces import InPieces
from weft.verify.precision import Float64Mode, widen
from weft.verify.processes import compare_with_emulator, one_thread
from weft.verify.reference import NUM_STEPS, run_reference
from weft.verify.share import Local

Say = Callable[[str], None]
Ran = tuple[tuple[Local, Mapping[str, Index]], ...]
"""What each piece of a rank computed, and what it stores of each tensor, by the reference's names."""


@dataclass(frozen=True)
class Task:
    """What every rank gets; `batches` are the inputs of each micro-batch, the rest is as in generated.py."""

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


def judge_pieces(
    made: InPieces, subject: Subject, *, seed: int, tolerance: float, say: Say, pool: Pool | None = None
) -> Result:
    """Run both sides and compare them; on the processes of `pool` if there is one."""
    count = made.plan.microbatches
    # one without backward may be made, and is none to train by
    check_schedule(made.pipeline, made.schedule)
    with written(made) as directory:
        say(f"training on one device, {count} micro-batches a step, in float64")
        reference = run_reference(subject, seed=seed, wide=True, microbatches=count, dims=made.dims)
        say(f"training on {made.plan.devices} emulated devices, in float64")
        processes = None
        with one_thread() if pool is not None else nullcontext():
            ours = run_pieces(directory, made, subject, seed=seed, wide=True, reference=reference)
        if pool is not None:
            say(f"training on {pool.num_ranks} processes, in float64")
            emulated = ours
            ours = run_pieces(directory, made, subject, seed=seed, wide=True, reference=reference, pool=pool)
            processes = compare_with_emulator(ours, emulated, pool.num_ranks)
        say("training on both in the model's own precision")
        narrow = run_pieces(directory, made, subject, seed=seed, wide=False)
    differences = compare(ours, reference)
    largest = max(found.value for found in differences)
    plain = run_reference(subject, seed=seed, wide=False, microbatches=count, dims=made.dims)
    return Result(
        equal=largest < tolerance and not ours.disagreements,
        largest_difference=largest,
        differences=differences,
        tolerance=tolerance,
        devices=made.plan.devices,
        disagreements=ours.disagreements,
        rounding=compare(narrow, plain),
        silenced=count_silenced(ours, reference),
        processes=processes,
        summary=summarize_pieces(made),
    )


def summarize_pieces(made: InPieces) -> dict[str, Any]:
    """Numbers about a pipeline."""
    timeline = simulate(made.pipeline, made.schedule)
    graph = made.sizes[0].graph
    return {
        "operators": len(graph.ops),
        "axes": {},
        "whole": [],
        "warnings": unruled_warnings(coverage(graph).kinds) if made.plan.devices > 1 else [],
        "pieces": [asdict(segment) for segment in made.pipeline.segments],
        "microbatches": made.plan.microbatches,
        "schedule": {str(device): row(events) for device, events in sorted(made.schedule.events.items())},
        "idle": timeline.idle,
    }


@contextmanager
def written(made: InPieces) -> Iterator[Path]:
    """A directory with the pipeline's files, while it is needed."""
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        for name, content in made.files().items():
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        yield Path(folder)


def run_pieces(
    directory: Path,
    made: InPieces,
    subject: Subject,
    *,
    seed: int,
    wide: bool,
    reference: Sample | None = None,
    pool: Pool | None = None,
) -> Sample:
    """Train for two steps through a pipeline: in the emulator, or on the processes of a pool."""
    task = _make_task(directory, made, subject, seed=seed, wide=wide, reference=reference, travels=pool is not None)
    if pool is not None:
        ran: list[Ran] = told(lambda: pool.run(work, task, timeout=TIMEOUT))
    else:
        ran = emulate(made.plan.devices, lambda transport: train(task, transport, subject.optimizer))
    shapes = {name: tuple(tensor.shape) for name, tensor in task.state.items()}
    pieces = [piece for rank in ran for piece in rank]
    names = {name: name for name in task.state}
    return assemble([local for local, _ in pieces], [stored for _, stored in pieces], shapes, names)


def _make_task(
    directory: Path,
    made: InPieces,
    subject: Subject,
    *,
    seed: int,
    wide: bool,
    reference: Sample | None,
    travels: bool,
) -> Task:
    graph = made.plan.graph
    whole = whole_tensors(graph, _with_example(subject, made.examples[0]), wide=wide)
    held: dict[str, tuple[str, ...]] = {one.tensor: one.names for one in graph.parameters}
    held.update({one.tensor: one.names for one in graph.buffers})
    path = subject.path.resolve() if travels and subject.path is not None else None
    change = widen if wide else (lambda tensor: tensor)
    batches = [[leaf for leaf in pytree.tree_leaves(one) if isinstance(leaf, torch.Tensor)] for one in made.examples]
    return Task(
        directory=directory.resolve(),
        state={name: whole.state[tensor] for tensor, name in whole.names.items()},
        batches=tuple(tuple(change(tensor.detach()) for tensor in one) for one in batches),
        shares=made.shares,
        size_of=made.size_of,
        names={each: name for tensor, name in whole.names.items() for each in held[tensor]},
        trained=tuple(whole.names[tensor] for tensor in whole.trained),
        noise=() if reference is None else tuple(map(noise_in, reference.gradients)),
        seed=seed,
        wide=wide,
        path=path,
        optimizer=subject.optimizer if travels and path is None else None,
    )


def _with_example(subject: Subject, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Subject:
    args, kwargs = arguments
    return Subject(subject.model, kwargs if kwargs and not args else args, path=subject.path)


def work(transport: ProcessTransport, task: Task) -> Ran:
    """What each process does."""
    optimizer = load_optimizer(task.path) if task.path is not None else task.optimizer
    assert optimizer is not None
    return train(task, transport, optimizer, transport.begin_step)


def train(
    task: Task, transport: Transport, optimizer: Optimizer, begin: Callable[[int], None] = lambda step: None
) -> Ran:
    """Two optimizer steps of one rank.

    Args:
        begin: is told the number of each step before it.
    """
    with Float64Mode() if task.wide else nullcontext():
        rank = load_pipeline(task.directory, Replica(transport, transport.num_ranks), BucketSync)
        held = [_Held(module, task) for module in rank.modules]
        for one in held:
            one.fill(task)
        locals_ = _train(rank, held, task, optimizer, begin)
        return tuple(zip(locals_, (one.stored for one in held), strict=True))


class _Held:
    """What one piece stores, by the reference's names."""

    def __init__(self, module: ParallelModule, task: Task) -> None:
        self.module = module
        self.names = {task.names[name]: name for name in module.stored if module.part(name) is not None}
        self.stored = {known: module.stored[name] for known, name in self.names.items()}
        self.trained = {task.names[name]: parameter for name, parameter in module.trained()}

    @torch.no_grad()
    def fill(self, task: Task) -> None:
        for known, name in self.names.items():
            self.module.part(name).copy_(take(task.state[known], self.stored[known]))

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: one.grad.clone() for name, one in self.trained.items() if one.grad is not None}

    def silence(self, noise: Mapping[str, Noise]) -> None:
        for name, parameter in self.trained.items():
            if name in noise and parameter.grad is not None:
                part = Noise(take(noise[name].where, self.stored[name]), noise[name].below)
                parameter.grad = part.silence(parameter.grad)

    def weights(self) -> dict[str, torch.Tensor]:
        return {known: self.module.part(name).detach().clone() for known, name in self.names.items()}


def _train(
    rank: Rank, held: Sequence[_Held], task: Task, optimizer: Optimizer, begin: Callable[[int], None]
) -> list[Local]:
    ordered: list[nn.Parameter] = []
    for name in task.trained:
        ordered += [one.trained[name] for one in held if name in one.trained]
    update = optimizer(ordered) if ordered else None
    losses: list[torch.Tensor] = []
    gradients: list[list[dict[str, torch.Tensor]]] = [[] for _ in held]
    for step in range(NUM_STEPS):
        begin(step + 1)
        for parameter in ordered:
            parameter.grad = None
        batches = [[tensor.clone() for tensor in one] for one in task.batches]
        found = rank.step(batches, task.shares, task.seed, step, size_of=task.size_of)
        losses.append(torch.stack([loss * share for loss, share in zip(found, task.shares, strict=True)]).sum())
        for one, kept in zip(held, gradients, strict=True):
            kept.append(one.gradients())
            one.silence(task.noise[step] if task.noise else {})
        if update is not None:
            update.step()
    return [Local(tuple(losses), tuple(kept), one.weights()) for one, kept in zip(held, gradients, strict=True)]

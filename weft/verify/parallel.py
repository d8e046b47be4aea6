"""The same two steps through the Program, on emulated devices.

In: a Program and the user's module and example. Out: a Sample with whole tensors, put together from what the ranks
store. Promised: each rank starts from nothing but the parts that its Script says it stores, and runs an optimizer
over those parts alone; where several ranks store the same element they must agree on it bit for bit, and every
disagreement is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from weft.capture.example import split_example
from weft.errors import PlanError, RunError
from weft.ir.graph import Buffer, Graph, Parameter
from weft.ir.program import Program
from weft.lower.script import script
from weft.ops.book import RuleBook
from weft.runtime.emulator import run_ranks
from weft.runtime.interpret import Rank, Trace
from weft.runtime.random import Stream
from weft.runtime.script import Index, Script
from weft.runtime.transfers import put, take
from weft.runtime.transport import CollectiveMismatch, RankFailed, Transport
from weft.verify.compare import Sample
from weft.verify.model_file import Optimizer, Subject
from weft.verify.precision import Float64Mode, widen
from weft.verify.reference import NUM_STEPS

Record = dict[tuple[str, int, int], torch.Tensor]
"""What one rank's ops made: (op name, output, slot) -> tensor."""


@dataclass(frozen=True)
class Whole:
    """Whole tensors before the first step, by tensor name of the Graph."""

    state: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    trained: tuple[str, ...]
    """Trained parameters, in the order of `module.parameters()`."""
    names: Mapping[str, str]
    """The name under which the reference knows each parameter and buffer."""

    def every(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors with their names in the Graph."""
        yield from self.state.items()
        yield from self.inputs.items()


@dataclass(frozen=True)
class Local:
    """What one rank computed."""

    losses: tuple[torch.Tensor, ...]
    gradients: tuple[Mapping[str, torch.Tensor], ...]
    weights: Mapping[str, torch.Tensor]


def run_parallel(
    program: Program,
    subject: Subject,
    *,
    seed: int,
    wide: bool,
    tamper: Callable[[list[Script]], list[Script]] = lambda scripts: scripts,
    through: Callable[[Transport], Transport] = lambda transport: transport,
) -> Sample:
    """Train for two steps in the emulator and put the results together.

    Args:
        tamper, through: change the Scripts or the Transport first; seeded faults do.
    """
    whole = whole_tensors(program.graph, subject, wide=wide)
    scripts = tamper(write_scripts(program))

    def body(transport: Transport) -> Local:
        transport = through(transport)
        with Float64Mode() if wide else nullcontext():
            return train_rank(scripts[transport.rank], transport, whole, subject.optimizer, program.graph, seed)

    return assemble(emulate(program.devices, body), scripts, program.graph, whole)


def record(program: Program, subject: Subject, *, seed: int) -> list[Record]:
    """One forward of step 1 in float64: what every op made, rank by rank."""
    whole = whole_tensors(program.graph, subject, wide=True)
    scripts = write_scripts(program)

    def body(transport: Transport) -> Record:
        found: Record = {}

        def trace(op: str, output: int, slot: int, tensor: torch.Tensor) -> None:
            found[op, output, slot] = tensor.clone()

        with Float64Mode():
            mine = scripts[transport.rank]
            start(mine, transport, parts_of(whole.state, mine), program.graph, trace).forward(
                parts_of(whole.inputs, mine), Stream(seed, 0, 0)
            )
        return found

    return emulate(program.devices, body)


def write_scripts(program: Program) -> list[Script]:
    """One Script per rank."""
    book = RuleBook(program.graph)
    return [script(program, rank, book) for rank in range(program.devices)]


def emulate(num_ranks: int, body: Any) -> list[Any]:
    """Run the ranks; a rank that fails is the user's to know about."""
    try:
        return run_ranks(num_ranks, body)
    except RankFailed as error:
        cause = error.__cause__
        raise RunError(
            f"rank {error.rank} failed: {type(cause).__name__}: {cause}",
            place=f"{error.place}  ({error.op})" if error.place else error.op,
            remedy="the other ranks were stopped; --debug shows where it happened",
        ) from error
    except CollectiveMismatch as error:
        raise RunError(
            f"the ranks' collectives do not fit together: {error}",
            remedy="this is a fault in the Program: please report it with the plan",
        ) from error


def whole_tensors(graph: Graph, subject: Subject, *, wide: bool) -> Whole:
    """Parameters, buffers, constants and inputs of the user's module."""
    model = subject.model
    first_names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    known = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    names: dict[str, str] = {}
    state: dict[str, torch.Tensor] = {}
    named: tuple[Parameter | Buffer, ...] = (*graph.parameters, *graph.buffers)
    for held in named:
        name = next((name for name in held.names if name in first_names), "")
        if not name:
            raise PlanError(
                f"the plan is for another model: this one has no {held.names[0]}",
                place=subject.place,
                remedy="capture this model with this example and plan its graph",
            )
        names[held.tensor], state[held.tensor] = name, known[name].detach()
    state.update(graph.constants)
    leaves, _ = tree_flatten(split_example(subject.example))
    if [one.index for one in graph.inputs] != [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]:
        raise PlanError(
            f"the plan is for another example: it has {len(graph.inputs)} tensors in other places",
            place=subject.place,
            remedy="capture this model with this example and plan its graph",
        )
    inputs = {one.tensor: leaves[one.index].detach() for one in graph.inputs}
    order = {name: position for position, name in enumerate(first_names)}
    trained = sorted((p for p in graph.parameters if p.trainable), key=lambda p: order.get(names[p.tensor], 0))
    change = widen if wide else _same
    return Whole(
        state={name: change(tensor) for name, tensor in state.items()},
        inputs={name: change(tensor) for name, tensor in inputs.items()},
        trained=tuple(parameter.tensor for parameter in trained),
        names=names,
    )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def parts_of(whole: Mapping[str, torch.Tensor], mine: Script) -> dict[str, torch.Tensor]:
    """This rank's own copies of its parts."""
    return {
        name: take(tensor, mine.stored[name]).clone(memory_format=torch.contiguous_format)
        for name, tensor in whole.items()
        if name in mine.stored
    }


def start(
    mine: Script, transport: Transport, state: Mapping[str, torch.Tensor], graph: Graph, trace: Trace | None = None
) -> Rank:
    """A rank ready to run its Script."""
    dtypes = {name: tensor.dtype for name, tensor in graph.tensors.items() if name not in graph.producers}
    return Rank(mine, transport, state=state, dtypes=dtypes, trace=trace)


def train_rank(
    mine: Script, transport: Transport, whole: Whole, optimizer: Optimizer, graph: Graph, seed: int
) -> Local:
    """Two optimizer steps of one rank over the parts that it stores."""
    state = parts_of(whole.state, mine)
    trained = {name: nn.Parameter(state[name]) for name in whole.trained if name in state}
    state.update({name: parameter.data for name, parameter in trained.items()})
    update = optimizer(list(trained.values())) if trained else None
    rank = start(mine, transport, state, graph)
    losses, gradients = [], []
    for step in range(NUM_STEPS):
        outputs = rank.forward(parts_of(whole.inputs, mine), Stream(seed, step, 0))
        losses.append(outputs[str(graph.loss)].clone())
        found = rank.backward()
        for name, parameter in trained.items():
            parameter.grad = found.get(name)
        gradients.append({name: gradient.clone() for name, gradient in found.items()})
        if update is not None:
            update.step()
        state.update(rank.updates())
        state.update({name: parameter.data for name, parameter in trained.items()})
    kept = {name: tensor.detach().clone() for name, tensor in state.items() if name in whole.names}
    return Local(losses=tuple(losses), gradients=tuple(gradients), weights=kept)


def assemble(locals_: Sequence[Local], scripts: Sequence[Script], graph: Graph, whole: Whole) -> Sample:
    """Whole tensors from the ranks' parts, and what they disagree on."""
    stored = [mine.stored for mine in scripts]
    quarrels: list[str] = []
    gradients = []
    for step in range(NUM_STEPS):
        parts = [local.gradients[step] for local in locals_]
        gradients.append(_join_all(parts, stored, graph, whole.names, f"gradient of step {step + 1}", quarrels))
    weights = _join_all([local.weights for local in locals_], stored, graph, whole.names, "weight", quarrels)
    for step in range(NUM_STEPS):
        losses = [local.losses[step] for local in locals_]
        quarrels += [
            f"loss of step {step + 1} on ranks 0 and {rank}"
            for rank, loss in enumerate(losses)
            if not same_bits(losses[0], loss)
        ]
    return Sample(losses=locals_[0].losses, gradients=tuple(gradients), weights=weights, disagreements=tuple(quarrels))


def _join_all(
    parts: Sequence[Mapping[str, torch.Tensor]],
    stored: Sequence[Mapping[str, Index]],
    graph: Graph,
    names: Mapping[str, str],
    what: str,
    quarrels: list[str],
) -> dict[str, torch.Tensor]:
    joined = {}
    for tensor in dict.fromkeys(name for part in parts for name in part):
        pieces = [(rank, stored[rank][tensor], part[tensor]) for rank, part in enumerate(parts) if tensor in part]
        joined[names[tensor]], faults = join(graph.tensors[tensor].sizes, pieces)
        quarrels += [f"{what} {names[tensor]}: {fault}" for fault in faults]
    return joined


def join(shape: tuple[int, ...], pieces: Sequence[tuple[int, Index, torch.Tensor]]) -> tuple[torch.Tensor, list[str]]:
    """A whole tensor from (rank, intervals, part), and where ranks disagree or an element is stored nowhere.

    >>> join((3,), [(0, (((0, 2),),), torch.tensor([1, 2])), (1, (((1, 3),),), torch.tensor([5, 3]))])
    (tensor([1, 2, 3]), ['rank 1 differs from the ranks before it'])
    """
    whole = torch.zeros(shape, dtype=pieces[0][2].dtype)
    known = torch.zeros(shape, dtype=torch.bool)
    faults = []
    for rank, index, part in pieces:
        seen = take(known, index)
        held = take(whole, index)
        if not same_bits(held[seen], part[seen]):
            faults.append(f"rank {rank} differs from the ranks before it")
        put(whole, index, torch.where(seen, held, part))
        put(known, index, torch.ones_like(seen))
    if not bool(known.all()):
        faults.append(f"{int((~known).sum())} elements are stored on no rank")
    return whole, faults


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit; two NaNs count as equal (their difference shows elsewhere)."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())

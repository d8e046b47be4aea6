"""The same two steps through the Program, on emulated devices.

In: a Program and the user's module and example. Out: a Sample with whole tensors, put together from what the ranks
store. Promised: each rank starts from nothing but the parts that its Script says it stores, and runs an optimizer
over those parts alone; where several ranks store the same element they must agree on it bit for bit, and every
disagreement is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from weft.capture.example import split_example
from weft.errors import PlanError, RunError, WeftError
from weft.ir.graph import Buffer, Graph, Parameter
from weft.ir.program import Program
from weft.lower.script import scripts
from weft.runtime.emulator import run_ranks
from weft.runtime.interpret import Rank
from weft.runtime.random import Stream
from weft.runtime.script import Index, Script
from weft.runtime.transfers import put, take
from weft.runtime.transport import CollectiveMismatch, RankFailed, Transport
from weft.verify.compare import Sample
from weft.verify.model_file import Subject
from weft.verify.precision import Float64Mode, widen
from weft.verify.reference import NUM_STEPS
from weft.verify.share import Local, Whole, make_shares, train

Record = dict[tuple[str, int, int], torch.Tensor]
"""What one rank's ops made: (op name, output, slot) -> tensor."""


def run_parallel(
    program: Program,
    subject: Subject,
    *,
    seed: int,
    wide: bool,
    reference: Sample | None = None,
    tamper: Callable[[list[Script]], list[Script]] = lambda scripts: scripts,
    through: Callable[[Transport], Transport] = lambda transport: transport,
) -> Sample:
    """Train for two steps in the emulator and put the results together.

    Args:
        reference: what the eager module computed, whose rounding the updates take as zero; only gradients are read.
        tamper, through: change the Scripts or the Transport first; seeded faults do.
    """
    whole = whole_tensors(program.graph, subject, wide=wide)
    scripts = tamper(write_scripts(program))
    shares = list(make_shares(whole, scripts, program.graph, seed=seed, wide=wide, reference=reference))

    def body(transport: Transport) -> Local:
        transport = through(transport)
        return train(shares[transport.rank], transport, subject.optimizer)

    shapes = {tensor: program.graph.tensors[tensor].sizes for tensor in whole.names}
    return assemble(emulate(program.devices, body), [mine.stored for mine in scripts], shapes, whole.names)


def record(program: Program, subject: Subject, *, seed: int) -> list[Record]:
    """One forward of step 1 in float64: what every op made, rank by rank."""
    whole = whole_tensors(program.graph, subject, wide=True)
    shares = list(make_shares(whole, write_scripts(program), program.graph, seed=seed, wide=True))

    def body(transport: Transport) -> Record:
        found: Record = {}

        def trace(op: str, output: int, slot: int, tensor: torch.Tensor) -> None:
            found[op, output, slot] = tensor.clone()

        mine = shares[transport.rank]
        with Float64Mode():
            rank = Rank(mine.script, transport, state=mine.state, dtypes=mine.dtypes, trace=trace)
            rank.forward(mine.inputs, Stream(seed, 0, 0))
        return found

    return emulate(program.devices, body)


def write_scripts(program: Program) -> list[Script]:
    """One Script per rank."""
    return list(scripts(program))


def emulate(num_ranks: int, body: Any) -> list[Any]:
    """Run the ranks as threads."""
    return told(lambda: run_ranks(num_ranks, body))


def told(run: Callable[[], list[Any]]) -> list[Any]:
    """Run the ranks; one that fails is the user's to know about."""
    try:
        return run()
    except RankFailed as error:
        cause = error.__cause__
        if isinstance(cause, WeftError) and cause.remedy:
            raise RunError(f"rank {error.rank}: {cause.message}", place=cause.place, remedy=cause.remedy) from error
        others = [f"\n  {line.strip()}" for line in str(error).splitlines() if line.startswith("  rank ")]
        raise RunError(
            f"rank {error.rank} failed: {type(cause).__name__}: {cause}{''.join(others)}",
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


def assemble(
    locals_: Sequence[Local],
    stored: Sequence[Mapping[str, Index]],
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    ranks: Sequence[int] | None = None,
) -> Sample:
    """Whole tensors from the ranks' parts, and what they disagree on.

    Args:
        stored: what each rank stores of each tensor.
        names: the reference's name of each tensor.
        ranks: whose each is; one after the other if not given. A rank may have several, or none.
    """
    quarrels: list[str] = []
    owners = range(len(locals_)) if ranks is None else ranks

    def join_all(parts: Sequence[Mapping[str, torch.Tensor]], what: str) -> dict[str, torch.Tensor]:
        joined = {}
        for tensor in dict.fromkeys(name for part in parts for name in part):
            held = zip(owners, stored, parts, strict=True)
            pieces = [(rank, index[tensor], part[tensor]) for rank, index, part in held if tensor in part]
            joined[names[tensor]], faults = join(shapes[tensor], pieces)
            quarrels.extend(f"{what} {names[tensor]}: {fault}" for fault in faults)
        return joined

    gradients = tuple(
        join_all([local.gradients[step] for local in locals_], f"gradient of step {step + 1}")
        for step in range(NUM_STEPS)
    )
    weights = join_all([local.weights for local in locals_], "weight")
    for step in range(NUM_STEPS):
        losses = [local.losses[step] for local in locals_]
        quarrels += [
            f"loss of step {step + 1} on ranks {owners[0]} and {rank}"
            for rank, loss in zip(owners, losses, strict=True)
            if not same_bits(losses[0], loss)
        ]
    return Sample(losses=locals_[0].losses, gradients=gradients, weights=weights, disagreements=tuple(quarrels))


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

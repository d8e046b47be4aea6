"""The same two steps on true processes, and how they compare with the emulator.

In: a Program and the user's module and example. Out: a Sample like the emulator's, and whether the two are equal bit
for bit. Each process gets nothing but its Share and where to find the optimizer: it captures and plans nothing.

On gloo sums are added in group order, as in the emulator, and every bit is the same if operators run with as many
threads. NCCL adds in an order of its own: there the results agree to rounding.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.errors import RunError
from weft.ir.program import Program
from weft.runtime.backend import choose_backend
from weft.runtime.groups import groups_of
from weft.runtime.launch import Pool
from weft.runtime.processes import TIMEOUT, ProcessTransport
from weft.verify.compare import Processes, Sample, compare
from weft.verify.model_file import Optimizer, Subject, load_optimizer
from weft.verify.parallel import assemble, same_bits, told, whole_tensors, write_scripts
from weft.verify.share import Local, Share, make_shares, train


@dataclass(frozen=True)
class Order:
    """What a process is to do. The optimizer of a model file is found there: a function of it cannot travel."""

    share: Share
    path: Path | None
    optimizer: Optimizer | None


def run_processes(
    program: Program,
    subject: Subject,
    pool: Pool,
    *,
    seed: int,
    wide: bool,
    reference: Sample | None = None,
    timeout: float = TIMEOUT,
) -> Sample:
    """Train for two steps on the processes of a pool and put the results together."""
    whole = whole_tensors(program.graph, subject, wide=wide)
    scripts = write_scripts(program)
    path = None if subject.path is None else subject.path.resolve()
    optimizer = subject.optimizer if path is None else None
    shares = make_shares(whole, scripts, program.graph, seed=seed, wide=wide, reference=reference)
    orders = [Order(share, path, optimizer) for share in shares]
    with _Travels(program):
        found: list[Local] = told(lambda: pool.run(work, each=orders, known=groups_of(scripts), timeout=timeout))
    return assemble(found, scripts, program.graph, whole)


def work(transport: ProcessTransport, order: Order) -> Local:
    """What each process does."""
    optimizer = load_optimizer(order.path) if order.path is not None else order.optimizer
    assert optimizer is not None
    return train(order.share, transport, optimizer, transport.begin_step)


def make_pool(num_ranks: int) -> Pool:
    """Processes for verification, starting."""
    pool = Pool(num_ranks, preload=(__name__,))
    pool.start()
    return pool


@contextmanager
def one_thread() -> Iterator[None]:
    """Run operators as the processes do: with how many threads one adds is part of the result."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare_with_emulator(processes: Sample, emulated: Sample, num_ranks: int) -> Processes:
    """Are two runs of one Program equal bit for bit?"""
    backend = choose_backend(num_ranks)
    worst = max(compare(processes, emulated), key=lambda found: found.value)
    if _same_samples(processes, emulated):
        return Processes(backend.name, equal_bits=True)
    why = "the operators' own arithmetic differs between a process and a thread; sums are added in the same order"
    if backend.native_sums:
        why = f"{backend.name} adds in an order of its own"
    return Processes(backend.name, False, worst.value, worst.tensor, why)


def _same_samples(a: Sample, b: Sample) -> bool:
    pairs: list[tuple[Any, Any]] = [(a.weights, b.weights), *zip(a.gradients, b.gradients, strict=True)]
    return all(same_bits(x, y) for x, y in zip(a.losses, b.losses, strict=True)) and all(
        mine.keys() == theirs.keys() and all(same_bits(mine[name], theirs[name]) for name in mine)
        for mine, theirs in pairs
    )


class _Travels:
    """Says which operator cannot be sent to a process, where pickle says what it stumbled upon."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, pickle.PicklingError | AttributeError | TypeError):
            return
        opaque = [op for op in self._program.graph.ops if op.function is not None]
        if opaque:
            raise RunError(
                f"the function of {opaque[0].name} cannot be sent to another process: {error}",
                place=opaque[0].place,
                remedy="define it at the top of an importable module, or verify without processes",
            ) from error

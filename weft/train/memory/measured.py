"""Measured memory: what ranks hold in a step on true processes, from live tensors.

In: a model and the files of its program. Out: Bytes of every rank (`runtime/ledger.py`), counted in the second step:
the first makes the optimizer's state and finds out how gradients arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from weft.compile.model_file import load_model_file
from weft.compile.programs import Content
from weft.compile.subject import in_precision
from weft.runtime.checks.ledger import Bytes, RankMemory, counted_step
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.program.files import files_of
from weft.runtime.weights.precision import Precision
from weft.train.loop import open_subject, optimizer_of
from weft.verify.ranks import told


@dataclass(frozen=True)
class Measuring:
    """What a process is to do.

    Args:
        origin: of the model: a path, or `hf:...`.
    """

    origin: str
    files: Content
    precision: Precision | None = None


def measure(
    origin: str, files: Content, *, precision: Precision | None = None, pool: Pool | None = None
) -> Sequence[Bytes]:
    """Train two steps on the example, on as many local processes as the program is for.

    Args:
        pool: of processes that are there already.
    """
    order = Measuring(origin, files, precision)
    with Pool(files_of(files).devices, preload=(__name__,)) if pool is None else nullcontext(pool) as workers:
        return told(lambda: workers.run(measure_rank, order))


def measure_rank(transport: ProcessTransport, order: Measuring) -> Bytes:
    """What each process does."""
    subject = in_precision(load_model_file(order.origin, hollow=0), order.precision)
    module = open_subject(order.files, transport, subject)
    optimizer = optimizer_of(subject, module)

    def step() -> None:
        module.train_step(subject.example, optimizer)

    step()
    optimizer.zero_grad(set_to_none=True)
    return counted_step(RankMemory(module, optimizer, module.program.modules, transport.memory), step)

"""Expected memory: what a rank will hold in a step, found without running it.

In: the files of a program, an example, an optimizer. Out: Bytes of a rank (`runtime/ledger.py`). The rank's own code
takes a step on tensors without content (torch's fake tensors), alone (`fake_transport.py`), and what it makes is
counted as in a true step. So the rules are those of the code itself: parts as they are stored; gathered weights that go
after their use; what autograd keeps of each operator as its kernels on this device ask for; recomputed and chunked
regions; the live micro-batches of a schedule; the optimizer's own state. Beyond that:

- shapes that depend on values are taken as large as they can get (`max_shape_mode.py`); an operator that reads a
  number out of a tensor cannot be foreseen, and that is said (`Unforeseen`);
- messages: one box for the largest message of each group that is too large for a pipe, in pieces;
- ranks are taken for processes of one host, and sums of gradients to begin at the end of backward, not during it.

No weight is looked at, and no memory of their size is needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

from weft.compile import Compiled
from weft.compile.model_file import Subject
from weft.compile.programs import Content
from weft.errors import RunError
from weft.ir.program import Program
from weft.runtime.checks.ledger import Bytes, RankMemory, counted_step
from weft.runtime.checks.max_shape_mode import MaxShapeMode
from weft.runtime.checks.shard_tensor import make_plain
from weft.runtime.links.fake_transport import FakeTransport
from weft.runtime.links.transport import Transport
from weft.runtime.program.files import files_of
from weft.runtime.training.parallel import Parallel
from weft.runtime.weights.buckets import BUCKET, in_buckets
from weft.runtime.weights.grad_sync import summed_parameters
from weft.train.loop import optimizer_of
from weft.train.opened import open_module

NOT_FORESEEN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class Unforeseen(RunError):  # noqa: N818 - says what it is about
    """The memory of a program that depends on values."""


@dataclass(frozen=True)
class Alike:
    """Ranks that hold as much as each other."""

    ranks: tuple[int, ...]
    bytes: Bytes


def expect_memory(files: Content, subject: Subject, ranks: Sequence[Sequence[int]] | None = None) -> list[Alike]:
    """What every rank will hold.

    Args:
        ranks: groups of ranks that are known to be alike; one of each is looked at. Each by itself if not given.
    """
    files = files_of(files)
    groups = [(rank,) for rank in range(files.devices)] if ranks is None else ranks
    return [Alike(tuple(group), expect_rank(files, subject, group[0])) for group in groups]


def alike_ranks(compiled: Compiled) -> list[tuple[int, ...]]:
    """Ranks that hold tensors of the same shapes, and run their pieces in the same order. Each by itself if only the
    files of the program are known."""
    pieces, ranks = compiled.pieces, range(compiled.devices)
    if pieces is None:
        return [(rank,) for rank in ranks]
    keys: list[list[Any]] = [[tuple(map(str, pieces.schedule.events.get(rank, ())))] for rank in ranks]
    for number, part in enumerate(part for one in pieces.sizes for part in one.parts):
        for rank, kind in zip(part.piece.segment.devices, kinds_of_ranks(part.program), strict=True):
            keys[rank].append((number, kind))
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank, key in enumerate(keys):
        groups.setdefault(tuple(key), []).append(rank)
    return [tuple(one) for one in groups.values()]


def kinds_of_ranks(program: Program) -> list[int]:
    """A number for each device of a program, the same for devices that hold tensors of the same shapes."""
    layouts = {*program.stored.values(), *(value.layout for value in program.values.values())}
    kinds = [0] * program.devices
    for layout in layouts:
        if layout.is_even and len(layout.grid.devices) == len(layout.grid.cells_on) == program.devices:
            continue
        shapes: list[Any] = [()] * program.devices
        for device in layout.grid.cells_on:
            shapes[device] = tuple(part.shape for part in layout.parts_on(device))
        known: dict[Any, int] = {}
        kinds = [known.setdefault(pair, len(known)) for pair in zip(kinds, shapes, strict=True)]
    return kinds


def expect_rank(files: Content, subject: Subject, rank: int) -> Bytes:
    """What one rank will hold."""
    silent = FakeTransport(rank, files_of(files).devices)
    with foreseen_step(files, subject, silent) as one:
        found = counted_step(RankMemory(one.module, one.optimizer, one.module.program.modules, silent.memory), one.run)
    return replace(found, messages=found.messages + silent.num_bytes, peak=found.peak + silent.num_bytes)


@dataclass(frozen=True)
class FakeStep:
    """A step of a rank on tensors without content, which may be taken once.

    Args:
        run: takes it.
    """

    module: Parallel
    optimizer: torch.optim.Optimizer
    run: Callable[[], None]


@contextmanager
def foreseen_step(files: Content, subject: Subject, silent: FakeTransport) -> Iterator[FakeStep]:
    """A rank whose next step is one of many: what the first one makes is there."""
    with _foreseen(subject), FakeTensorMode(allow_non_fake_inputs=True) as fake, MaxShapeMode() as largest:
        module = _opened(files, silent, subject)
        optimizer = optimizer_of(subject, module)
        # as where it is watched over: parameters without elements are left out
        optimizer.register_step_pre_hook(lambda *_: make_plain(module.parameters()))
        if silent.by_block:
            # as optimizers choose on devices
            optimizer.defaults["foreach"] = True
            for group in optimizer.param_groups:
                group["foreach"] = not group.get("fused")
        with largest.reading(1):
            _first_update(optimizer)
        silent.lend(_sums(module))
        batch = pytree.tree_map_only(Tensor, fake.from_tensor, subject.example)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            module.forward_backward(batch)
            with largest.reading(1):
                optimizer.step()

        if any(part.keeps for program in module.program.modules for part in program.stored_parts().values()):
            # the first step makes what is kept
            step()
            optimizer.zero_grad(set_to_none=True)
            silent.lend(_sums(module))
        yield FakeStep(module, optimizer, step)


def _first_update(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state."""
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _sums(module: Parallel) -> Iterator[int]:
    """Bytes of the buckets in which gradients are summed."""
    for program in module.program.modules:
        for bucket in in_buckets(summed_parameters(program), BUCKET):
            yield sum(one.num_bytes for one in bucket)


def _opened(files: Content, transport: Transport, subject: Subject) -> Parallel:
    module = open_module(files, transport, None, reduction=subject.reduction, mixed=subject.mixed)
    if not module.returns_loss:
        raise Unforeseen(
            "the memory of a step cannot be foreseen: the module returns no loss",
            place=subject.place,
            remedy="a forward that returns a scalar loss",
        )
    return module


@contextmanager
def _foreseen(subject: Subject) -> Iterator[None]:
    """Says that a program cannot be foreseen, in place of torch's errors."""
    try:
        with warnings.catch_warnings():
            # fake tensors have no addresses, and torch says so whenever it is asked for one
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    except NOT_FORESEEN as error:
        raise Unforeseen(
            f"the memory of a step cannot be foreseen: {type(error).__name__}: {error}",
            place=subject.place,
            remedy="measure it: weft show FILE --plan P --memory --measure",
        ) from error

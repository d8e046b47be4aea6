"""Ranks: run as threads, their failures told to users, what they store put together.

In: what each rank does, or what each computed. Out: a Sample with whole tensors. Promised: where several ranks store
the same element they must agree on it bit for bit, and every disagreement is reported.
"""

from __future__ import annotations

import itertools
import linecache
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.capture.source import place_of_error
from weft.errors import RunError, WeftError
from weft.runtime.layout.execute import put, take
from weft.runtime.layout.transfer import Index
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import CollectiveMismatch, RankFailed
from weft.runtime.program.files import GENERATED
from weft.verify.compare import Sample, Tensors


@dataclass(frozen=True)
class Local:
    """What one module of a rank computed, and what the rank stores of each tensor, by the reference's names."""

    rank: int
    losses: tuple[Tensor, ...]
    gradients: tuple[Tensors, ...]
    weights: Tensors
    stored: Mapping[str, Index]
    outputs: tuple[Tensor, ...] = ()


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
            place=_place_of(cause) or (f"{error.place}  ({error.op})" if error.place else error.op),
            remedy="the other ranks were stopped; --debug shows where it happened",
        ) from error
    except CollectiveMismatch as error:
        raise RunError(f"the ranks' collectives do not fit together: {error.message}", remedy=error.remedy) from error


def _place_of(error: BaseException | None) -> str:
    """The user's line that a rank was at: their own code, or the line above the statement in the generated text."""
    trace = None if error is None else error.__traceback__
    if place := place_of_error(trace):
        return place
    for frame in reversed(traceback.extract_tb(trace)):
        if frame.filename.startswith(GENERATED):
            lines = (linecache.getline(frame.filename, at).strip() for at in range(frame.lineno or 0, 0, -1))
            return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "")
    return ""


def assemble(found: Sequence[Local], shapes: Mapping[str, tuple[int, ...]]) -> Sample:
    """Whole tensors from the ranks' parts, and what they disagree on. A rank may have several modules, or none."""
    quarrels: list[str] = []

    def join_all(parts: Sequence[Tensors], what: str) -> dict[str, Tensor]:
        joined = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            held = zip(found, parts, strict=True)
            pieces = [(one.rank, one.stored[name], part[name]) for one, part in held if name in part]
            joined[name], faults = join(shapes[name], pieces)
            quarrels.extend(f"{what} {name}: {fault}" for fault in faults)
        return joined

    first = found[0]
    gradients = tuple(
        join_all([one.gradients[step] for one in found], f"gradient of step {step + 1}")
        for step in range(len(first.losses))
    )
    weights = join_all([one.weights for one in found], "weight")
    for one in found[1:]:
        pairs = [
            *zip((f"loss of step {step}" for step in itertools.count(1)), first.losses, one.losses, strict=False),
            *zip((f"output {at} of evaluation" for at in itertools.count()), first.outputs, one.outputs, strict=False),
        ]
        quarrels += [f"{what} on ranks {first.rank} and {one.rank}" for what, a, b in pairs if not same_bits(a, b)]
    return Sample(first.losses, gradients, weights, tuple(quarrels), first.outputs)


def join(shape: tuple[int, ...], pieces: Sequence[tuple[int, Index, Tensor]]) -> tuple[Tensor, list[str]]:
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


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit; two NaNs count as equal (their difference shows elsewhere)."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())

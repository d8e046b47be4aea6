"""The largest batch, or the longest sequence, that fits.

In: a model, a plan, a cluster. Out: the most rows (or positions) with which a step fits into each rank's memory. What a
rank holds grows by the same amount with each further multiple of the example's batch, so two recordings say where the
limit is, and further ones make sure. Sequences may cost more than in proportion: their limit is looked for by halves. A
size that the model cannot take (its table of positions is too short) does not fit either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.compile import compile_subject
from weft.compile.model_file import Subject
from weft.cost.cluster.cluster import Cluster
from weft.errors import RunError, WeftError
from weft.ir.graph import Graph
from weft.simulate.foresee import room, traces_of

BATCH, SEQUENCE = "batch", "sequence"
MOST = 1 << 16
"""Times the example beyond which nobody looks."""


@dataclass(frozen=True)
class Largest:
    """The largest size that fits.

    Args:
        what: BATCH or SEQUENCE. size: how much of it; example: that of the model file.
        memory: bytes of the fullest rank. next: the size that was tried and does not fit, None if none was.
        why: it does not, if it is not the memory.
    """

    what: str
    size: int
    example: int
    memory: int
    next: int | None
    why: str = ""


def largest(
    what: str,
    subject: Subject,
    plan: Any,
    cluster: Cluster,
    devices: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Largest:
    """Look for the most that fits."""
    known: dict[int, int] = {}
    peaks: dict[int, int] = {}
    refused: dict[int, WeftError] = {}

    def over(times: int) -> int:
        """Bytes beyond what there is, with so many times the example."""
        if times not in known:
            say(f"{what} of {times * size}")
            try:
                known[times], peaks[times] = _over(scaled(subject, what, times), plan, cluster, devices)
            except WeftError as error:
                if times == 1:
                    raise
                known[times], refused[times] = 1, error
        return known[times]

    size = size_of(subject, what)
    if over(1) > 0:
        raise RunError(
            f"the example itself, a {what} of {size}, does not fit: {over(1)} bytes too many",
            place=subject.place,
            remedy="weft simulate tells what takes them; a smaller example, or another plan",
        )
    if over(2) > 0 and 2 in refused:
        raise RunError(
            f"a {what} of {2 * size} cannot be captured: {refused[2].message}",
            place=refused[2].place or subject.place,
            remedy="a model whose tables (of positions, masks) are long enough, or a smaller example",
        ) from refused[2]
    low, high = 1, 2
    while high <= MOST and over(high) <= 0:
        grows = known[high] - known[low]
        # as if it went on like this
        reach = high + int(-known[high] * (high - low) / grows) if grows > 0 else MOST
        low, high = high, max(min(reach, 2 * high if what == SEQUENCE else MOST), high + 1)
    while high <= MOST and high - low > 1:
        grows = known[high] - known[low]
        guess = low + int(-known[low] * (high - low) / grows) if grows > 0 else 0
        by_halves = what == SEQUENCE or high in refused or not guess
        middle = (low + high) // 2 if by_halves else min(max(guess, low + 1), high - 1)
        low, high = (middle, high) if over(middle) <= 0 else (low, middle)
    why = refused[high].message if high in refused else ""
    return Largest(what, low * size, size, peaks[low], high * size if high in known else None, why)


def size_of(subject: Subject, what: str) -> int:
    """The example's."""
    tensors = [one for one in pytree.tree_leaves(subject.example) if isinstance(one, Tensor)]
    dim = 0 if what == BATCH else 1
    found = next((one.shape[dim] for one in tensors if one.dim() > dim), None)
    if found is None:
        raise RunError(f"the example has no {what}", place=subject.place, remedy="an example of two dims or more")
    return int(found)


def scaled(subject: Subject, what: str, times: int) -> Subject:
    """The same with a larger example: its rows, or positions, again and again."""
    size, dim = size_of(subject, what), 0 if what == BATCH else 1

    def longer(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        # masks have positions along two dims
        dims = [at for at, length in enumerate(tensor.shape) if length == size and (at == dim if what == BATCH else at)]
        for at in dims:
            tensor = torch.cat([tensor] * times, at)
        return tensor

    return replace(subject, example=pytree.tree_map(longer, subject.example))


def _over(subject: Subject, plan: Any, cluster: Cluster, devices: int | None) -> tuple[int, int]:
    """Bytes of the fullest rank beyond what its device has, and all of its bytes."""
    compiled = compile_subject(subject, plan, devices)
    _refuse_short_tables(compiled.graph)
    traces = traces_of(compiled, subject, cluster)
    return max((one.peak - room(cluster.device(one.rank)), one.peak) for one in traces)


def _refuse_short_tables(graph: Graph) -> None:
    """Positions that are counted beyond the rows of their table: tensors without content do not tell."""
    for op in graph.ops:
        if op.kind != "embedding" or len(op.inputs) < 2:
            continue
        table, made = graph.tensors[op.inputs[0]], graph.producers.get(op.inputs[1])
        # through views of them
        while made is not None and made.kind != "arange" and made.constant and made.inputs:
            made = graph.producers.get(made.inputs[0])
        if made is None or made.kind != "arange":
            continue
        (count, *_), (rows, *_) = graph.tensors[made.outputs[0]].sizes, table.sizes
        if count > rows:
            raise RunError(
                f"{table.name} has {rows} rows, and position {count - 1} is looked up",
                place=op.place,
                remedy="a longer table",
            )

"""A memory limit: a plan that needs more is refused before anything is started.

In: the files of a program, its model, a limit as `2GiB`. Out: nothing, or a RunError with the bytes of the fullest rank
by kind and what would take less. The limit is one of tensors: what is expected at the peak of a step
(`train/expected.py`). A program that cannot be foreseen is not refused; that is told. Without a limit, processes that
will need more than this machine has free are told of before they are started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.compile import Compiled
from weft.compile.model_file import Subject
from weft.compile.programs import Content
from weft.errors import RunError
from weft.ir.graph import Graph
from weft.runtime.checks.ledger import KINDS, Bytes
from weft.runtime.program.files import files_of
from weft.train.memory.amounts import read_bytes, shown
from weft.train.memory.expected import Alike, Unforeseen, alike_ranks, expect_memory

PROCESS = 200 << 20
"""Bytes of Python and torch in every process."""
NAMES = {"kept": "kept weights", "optimizer": "optimizer state", "activations": "saved activations"}
"""Of kinds of bytes, for people, where they go by another name."""


def check_limit(
    files: Content,
    subject: Subject,
    limit: str | int,
    *,
    ranks: Sequence[Sequence[int]] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Refuse a program of which some rank will hold more than the limit.

    Args:
        ranks: groups of ranks that are known to be alike.
        tell: is told that a program cannot be foreseen.
    """
    allowed = read_bytes(limit)
    try:
        found = expect_memory(files, subject, ranks)
    except Unforeseen as error:
        tell(f"{error.message}; the limit of {shown(allowed)} is not checked")
        return
    fullest = max(found, key=lambda one: one.bytes.peak)
    if fullest.bytes.peak > allowed:
        raise RunError(
            f"rank {fullest.ranks[0]} will hold {shown(fullest.bytes.peak)} at the peak of a step, and "
            f"{shown(allowed)} are allowed: {breakdown(fullest)}",
            place=subject.place,
            remedy=remedy(fullest.bytes, files_of(files).devices),
        )


def tell_scarce(compiled: Compiled, subject: Subject, num_ranks: int, tell: Callable[[str], None]) -> None:
    """Tell of processes that will not fit into what this machine has free. Small models are not looked at."""
    there, replicas = available(), num_ranks // compiled.devices
    if there is None or (_at_most(compiled.graph) + PROCESS) * num_ranks <= there // 2:
        return
    try:
        found = expect_memory(compiled.files, subject, alike_ranks(compiled))
    except Unforeseen:
        return
    needed = replicas * sum(len(one.ranks) * (one.bytes.peak + PROCESS) for one in found)
    if needed > there:
        fullest = max(found, key=lambda one: one.bytes.peak)
        tell(
            f"warning: {num_ranks} processes will need some {shown(needed)} at the peak of a step, and {shown(there)} "
            f"are free on this machine; rank {fullest.ranks[0]} will hold {shown(fullest.bytes.peak)}: "
            f"{breakdown(fullest)}; try: {remedy(fullest.bytes, num_ranks)}"
        )


def _at_most(graph: Graph) -> int:
    """Bytes of everything that a step makes of a model on one device: its values twice, and AdamW's state."""
    held = {one.tensor for one in graph.parameters}
    sizes = {name: math.prod(one.sizes) * one.dtype.itemsize for name, one in graph.tensors.items()}
    return 2 * sum(sizes.values()) + 2 * sum(sizes[name] for name in held)


def available() -> int | None:
    """Bytes that processes of this machine can still have; None if the system does not say."""
    path = Path("/proc/meminfo")
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found[1]) * 1024


def breakdown(found: Alike) -> str:
    """What the bytes are, the largest first."""
    kinds = {kind: found.bytes.as_json()[kind] for kind in KINDS}
    kinds["rest of the peak"] = found.bytes.peak - sum(kinds.values())
    largest = sorted((kind for kind in kinds if kinds[kind] > 0), key=lambda kind: -kinds[kind])
    return ", ".join(f"{NAMES.get(kind, kind)} {shown(kinds[kind])}" for kind in largest)


def remedy(found: Bytes, devices: int) -> str:
    """What takes less of the largest part."""
    if found.activations > found.state:
        return "recompute=full, coshard=2, more microbatches, or a smaller batch; weft show --memory tells more"
    more = "zero=3 with dp" if devices > 1 else "more devices with zero=3 (dp=2,zero=3)"
    return f"{more}, tp or pp, over more devices, to store parameters in parts; weft show --memory tells more"

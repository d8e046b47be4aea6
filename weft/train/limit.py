"""A memory limit: a plan that needs more is refused before anything is started.

In: the files of a program, its model, a limit as `2GiB`. Out: nothing, or a RunError with the bytes of the fullest rank
by kind and what would take less. The limit is one of tensors: what is expected at the peak of a step
(`train/expected.py`). A program that cannot be foreseen is not refused; that is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.errors import RunError
from weft.runtime.ledger import KINDS, Bytes
from weft.train.amounts import read_bytes, shown
from weft.train.expected import Alike, Unforeseen, expect_memory
from weft.train.opened import Content, num_devices
from weft.verify.model_file import Subject

NAMES = {"kept": "kept weights", "optimizer": "optimizer state", "activations": "saved activations"}


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
            remedy=remedy(fullest.bytes, num_devices(files)),
        )


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
    return f"{more}, tp or pp to store parameters in parts; weft show --memory tells more"

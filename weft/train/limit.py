"""A memory limit: a plan that needs more is refused before anything is started.

In: a compiled program, its model, a limit as `2GiB`. Out: nothing, or a RunError with the bytes of the fullest rank by
kind and what would take less. The limit is one of tensors: what is expected at the peak of a step
(`train/expected.py`). A program that cannot be foreseen is not refused; that is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from weft.compile import Compiled
from weft.errors import RunError
from weft.runtime.ledger import KINDS, Bytes
from weft.train.expected import Alike, Unforeseen, alike_ranks, expect_memory
from weft.verify.model_file import Subject

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
NAMES = {"kept": "kept weights", "optimizer": "optimizer state", "activations": "saved activations"}


def read_bytes(text: str | int) -> int:
    """A number of bytes, as people write it.

    >>> read_bytes("2GiB"), read_bytes("1.5 GB"), read_bytes(4096)
    (2147483648, 1500000000, 4096)
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", str(text).lower())
    number = re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", found[1]) if found else None
    if found is None or number is None or found[2] not in UNITS or float(found[1]) <= 0:
        raise RunError(f"{text!r} is no amount of memory", remedy="a number and a unit: 2GiB, 500MB")
    return int(float(found[1]) * UNITS[found[2]])


def check_limit(
    compiled: Compiled, subject: Subject, limit: str | int, *, tell: Callable[[str], None] = lambda text: None
) -> None:
    """Refuse a program of which some rank will hold more than the limit.

    Args:
        tell: is told that a program cannot be foreseen.
    """
    allowed = read_bytes(limit)
    try:
        found = expect_memory(compiled.files, subject, alike_ranks(compiled))
    except Unforeseen as error:
        tell(f"{error.message}; the limit of {shown(allowed)} is not checked")
        return
    fullest = max(found, key=lambda one: one.bytes.peak)
    if fullest.bytes.peak > allowed:
        raise RunError(
            f"rank {fullest.ranks[0]} will hold {shown(fullest.bytes.peak)} at the peak of a step, and "
            f"{shown(allowed)} are allowed: {breakdown(fullest)}",
            place=subject.place,
            remedy=remedy(fullest.bytes, compiled.devices),
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


def shown(size: float) -> str:
    """`1.5 MiB`.

    >>> shown(1536 << 10), shown(3)
    ('1.5 MiB', '3 B')
    """
    number, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(number) >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:.4g} {units[0]}"

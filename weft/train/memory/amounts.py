"""Amounts of memory, as people write and read them: `2GiB`."""

from __future__ import annotations

import re

from weft.errors import RunError

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def read_bytes(text: str | int) -> int:
    """A number of bytes, as people write it.

    >>> read_bytes("2GiB"), read_bytes("1.5 GB"), read_bytes(4096)
    (2147483648, 1500000000, 4096)
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*", str(text).lower())
    if found is None or found[2] not in UNITS or float(found[1]) <= 0:
        raise RunError(
            f"{text!r} is no amount of memory", place="the memory limit", remedy="a number and a unit: 2GiB, 500MB"
        )
    return int(float(found[1]) * UNITS[found[2]])


def shown(size: float) -> str:
    """`1.5 MiB`.

    >>> shown(1536 << 10), shown(3)
    ('1.5 MiB', '3 B')
    """
    number, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(number) >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:.4g} {units[0]}"

"""Links: what a collective costs on one backend.

In: the kind of a collective, the size of its group, the bytes of its buffer. Out: seconds for one member:

    seconds = latency + peers * peer_latency + rate * factor * bytes

With n members `bytes` and `factor` are: the local tensor, 2(n-1)/n (all_reduce); the gathered result, (n-1)/n
(all_gather); the local tensor, (n-1)/n (reduce_scatter, all_to_all); what is sent, 1 (broadcast); the larger of what
is sent and what is received, 1 (exchange); what is copied, 1 (local, without latency of a collective).
The numbers come from `DEFAULTS` or from a measured JSON file. What was measured at several sizes is a curve: between
two sizes the seconds are on the line between theirs. Buckets have curves of their own: what lies in memory that members
share, or is sent as it lies, is carried in another way than a tensor by itself.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.errors import WeftError
from weft.runtime.layout import moves
from weft.runtime.layout.moves import Move

CALL = 2e-6
"""Seconds to call a local operation at all: keeps needless local steps out of a path."""


@dataclass(frozen=True)
class Kind:
    """A kind of collective.

    Args:
        rounds: how often a member's share of the buffer, (n-1)/n of it, crosses a link; 0: all of it, once.
        example: a move of this kind along the axis `all`, which is timed; None for what is no move.
    """

    rounds: int = 0
    example: Move | None = None

    def factor(self, group_size: int) -> float:
        """What part of the bytes crosses a link."""
        return self.rounds * (group_size - 1) / group_size if self.rounds else 1.0


KINDS: Mapping[str, Kind] = {
    "all_reduce": Kind(2, moves.all_reduce("all")),
    "all_gather": Kind(1, moves.all_gather(0, "all")),
    "reduce_scatter": Kind(1, moves.reduce_scatter(0, "all")),
    "all_to_all": Kind(1, moves.all_to_all(0, "all", joined=1)),
    "broadcast": Kind(),
    "exchange": Kind(),
    "local": Kind(),
}


BUCKET = "bucket "
"""Before the kind of a collective of a bucket of tensors."""
BUCKETS = tuple(BUCKET + kind for kind in ("all_reduce", "all_gather", "reduce_scatter"))
Curve = tuple[tuple[float, float], ...]
"""Bytes and seconds, by bytes."""


@dataclass(frozen=True)
class Links:
    """Latencies in seconds; rates, by kind, in seconds per byte that crosses the slowest link of a member.

    Args:
        curves: of groups of `members`, by kind, also of `BUCKETS`.
    """

    name: str
    latency: float
    peer_latency: float
    rates: Mapping[str, float]
    members: int = 0
    curves: Mapping[str, Curve] = field(default_factory=dict)

    def seconds(self, kind: str, group_size: int, bytes: float) -> float:
        """Time of one member in a collective.

        >>> round(DEFAULTS["gloo"].seconds("all_reduce", 2, 32 << 20), 3)
        0.07
        """
        if group_size == self.members and kind in self.curves:
            return on_curve(self.curves[kind], bytes)
        kind = kind.removeprefix(BUCKET)
        if kind == "local" or group_size == 1:
            return CALL + self.rates["local"] * bytes
        peers = group_size - 1
        # An exchange posts a send and a receive for every peer; a collective posts once.
        messages = 2 * peers if kind == "exchange" else peers
        return self.latency + messages * self.peer_latency + self.rates[kind] * KINDS[kind].factor(group_size) * bytes

    def to_json(self) -> str:
        """As one JSON object."""
        fields = {"name": self.name, "latency": self.latency, "peer_latency": self.peer_latency, **self.rates}
        measured = {"members": self.members, "curves": dict(self.curves)} if self.curves else {}
        return json.dumps({**fields, **measured}, indent=2)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")


def on_curve(curve: Curve, bytes: float) -> float:
    """The seconds between those of two sizes; beyond the last one, on the line through the last two."""
    sizes = [size for size, _ in curve]
    at = min(max(bisect_right(sizes, bytes), 1), len(curve) - 1)
    (low, first), (high, last) = curve[at - 1], curve[at]
    return max(first + (last - first) * (bytes - low) / (high - low), min(first, last) if bytes < low else 0.0)


def from_json(text: str, place: str = "") -> Links:
    """Read what `to_json` wrote; every field must be there, as a number that is not negative."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise WeftError(f"not JSON: {error}", place=place, remedy="measure the links again") from None
    numbers = ("latency", "peer_latency", *KINDS)
    measured = (
        {name: found.pop(name) for name in ("members", "curves") if name in found} if isinstance(found, dict) else {}
    )
    if not isinstance(found, dict) or found.keys() != {"name", *numbers} or not _are_curves(measured):
        raise WeftError(
            f"a table of links has exactly the fields name, {', '.join(numbers)}",
            place=place,
            remedy="write one with weft profile",
        )
    wrong = [name for name in numbers if not _is_time(found[name])]
    if wrong or not isinstance(found["name"], str):
        raise WeftError(
            f"{', '.join(wrong) or 'name'}: seconds must be numbers >= 0, the name a text",
            place=place,
            remedy="measure the links again",
        )
    latency, peer_latency, *rates = (float(found[name]) for name in numbers)
    curves = {kind: tuple((float(a), float(b)) for a, b in each) for kind, each in measured.get("curves", {}).items()}
    return Links(
        found["name"], latency, peer_latency, dict(zip(KINDS, rates, strict=True)), measured.get("members", 0), curves
    )


def _are_curves(found: Mapping[str, Any]) -> bool:
    """True if there are none, or all are lists of at least two growing sizes with their seconds."""
    if not found:
        return True
    members, curves = found.get("members"), found.get("curves")
    if not isinstance(members, int) or members < 2 or not isinstance(curves, dict):
        return False
    return all(kind in (*KINDS, *BUCKETS) and _is_curve(curve) for kind, curve in curves.items())


def _is_curve(curve: object) -> bool:
    if not isinstance(curve, list) or len(curve) < 2:
        return False
    pairs = all(isinstance(one, list) and len(one) == 2 and all(map(_is_time, one)) for one in curve)
    return pairs and all(low[0] < high[0] for low, high in pairwise(curve))


def _is_time(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and number >= 0


def load(path: str | Path) -> Links:
    """Read a saved table."""
    if not Path(path).is_file():
        raise WeftError(f"no such file: {path}", remedy="measure the links, or use a built-in table")
    return from_json(Path(path).read_text(), place=str(path))


# gloo: two ranks of one host, buffers of 32 MiB: all_reduce 70 ms, all_gather 112, reduce_scatter 124, all_to_all 28,
# broadcast 20, one send 26. A pair that sends both ways shares the host's copying, so its rate is twice that of one
# send, which is the rate of all_to_all within its spread. NVLink-like: 200 GB/s each way, 10 us to launch a kernel.
DEFAULTS: Mapping[str, Links] = MappingProxyType(
    {
        "gloo": Links(
            name="gloo",
            latency=2e-4,
            peer_latency=5e-5,
            rates={
                "all_reduce": 2.08e-9,
                "all_gather": 6.67e-9,
                "reduce_scatter": 7.38e-9,
                "all_to_all": 1.65e-9,
                "broadcast": 0.59e-9,
                "exchange": 1.65e-9,
                "local": 0.25e-9,
            },
        ),
        "nccl": Links(
            name="nccl",
            latency=1e-5,
            peer_latency=1.5e-6,
            rates={**dict.fromkeys(KINDS, 5e-12), "local": 1e-12},
        ),
    }
)


def default_links(name: str) -> Links:
    """The built-in table of a backend."""
    if name not in DEFAULTS:
        raise WeftError(f"no table of links for {name!r}", remedy=f"use one of {', '.join(DEFAULTS)}, or measure it")
    return DEFAULTS[name]

"""Levels of links: what connects devices inside a host, hosts with each other.

A Level is data. An *island* of a level is a run of `span` neighbouring ranks that it connects. Innermost levels come
first in a cluster; the islands of one level are the members of an island of the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.cost.links import Links
from weft.errors import WeftError, did_you_mean

SHAPES: Mapping[str, str] = {
    "switch": "every device reaches every other one at full bandwidth",
    "mesh": "each pair has a link of its own: a group uses those links only that lead to its members",
    "ring": "links lead to two neighbours: what goes further passes through others",
    "pcie": "all devices of an island share its links",
}


@dataclass(frozen=True)
class Level:
    """One level of links.

    Args:
        span: how many ranks an island has.
        bandwidth: bytes a second in one direction, of one link: each device's own, or one of `links`.
        latency: seconds that a collective takes for nothing. peer_latency: seconds of one hop at full rate; small
            messages take less (`collectives.PROTOCOLS`).
        shape: one of `SHAPES`.
        links: how many links the devices of an island of the level below (as the NICs of a host) share, each at most
            one; 0: each has its own. Of `pcie`: those that the devices of one of its own islands share.
        efficiency: what part of the bandwidth collectives reach.
        table: measured costs, which hold for groups that span this level and no more.
        sources: where each number is from, by the field's name.
    """

    name: str
    span: int
    bandwidth: float
    latency: float
    peer_latency: float
    shape: str = "switch"
    links: int = 0
    efficiency: float = 1.0
    table: Links | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            near = did_you_mean(self.shape, SHAPES)
            raise WeftError(f"shape: {self.shape!r} is no shape of links", remedy=f"{near}one of: {', '.join(SHAPES)}")
        finite = float("inf")
        bounds = {
            "span": (self.span >= 1, "below 1"),
            "links": (self.links >= 0, "below 0"),
            "bandwidth": (0 < self.bandwidth < finite, "not above 0"),
            "latency": (0 <= self.latency < finite, "below 0"),
            "peer_latency": (0 <= self.peer_latency < finite, "below 0"),
            "efficiency": (0 < self.efficiency <= 1, "not in (0, 1]"),
        }
        for name, (good, why) in bounds.items():
            if not good:
                raise WeftError(
                    f"{name}: {getattr(self, name)} of level {self.name} is {why}", remedy="correct the number"
                )

    def rate(self, below: int, sharers: int, fan_out: int) -> float:
        """Bytes a second that one device sends here.

        Args:
            below: ranks of an island of the level below. sharers: devices that use the same links at the same time.
            fan_out: how many islands of the level below take part.
        """
        share = min(1.0, self.links / sharers) if self.links else 1.0
        if self.shape == "mesh" and self.span > below:
            share *= (fan_out - 1) / (self.span // below - 1)
        return self.efficiency * self.bandwidth * share

"""Collectives on levels of links: seconds of each algorithm, as a straight line over bytes.

In: the shape of a group (how many members each island has) and the levels. Out: for a kind of collective the `Line` of
each algorithm and protocol: fixed seconds, seconds per byte. A collective takes the cheapest one. `bytes` are those
of `weft.cost.links`.

    ring           all links of all levels at once, one ring for each member of an island: what leaves an island
                   leaves by as many links as it has members (`rails`)
    hierarchical   all_reduce: reduce-scatter inside, all-reduce across, all-gather inside, in chunks: the levels work
                   at the same time, so the slowest one counts, and latencies add up
    tree           all_reduce: the same with a double binary tree between hosts
    direct         all_to_all, exchange: each to each; bytes are assumed to spread evenly over the peers
    measured       where a level has a table

As NCCL does, all_gather and reduce_scatter are rings.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.cost.cluster.levels import Level
from weft.cost.links import KINDS

PROTOCOLS: Mapping[str, tuple[float, float]] = {"simple": (1.0, 1.0), "LL128": (0.5, 1 / 0.92), "LL": (0.2, 4.0)}
"""How a message is carried: what part of a hop's latency it takes, how many times the seconds per byte. Source: NCCL,
src/graph/tuning.cc (hwLat of rings over NVLink and network, rounded; busBw of LL128 and LL)."""

PLAIN = {"simple": PROTOCOLS["simple"]}
"""Those of gloo, between hosts' processes."""


@dataclass(frozen=True)
class Shape:
    """What the cost of a group depends on.

    Args:
        size: members. islands: for each level, up to the one that holds all, how many islands have members.
        fewest, most: members that such an island has.
        kinds: numbers of the kinds of hosts that take part.
    """

    size: int
    islands: tuple[int, ...]
    fewest: tuple[int, ...]
    most: tuple[int, ...]
    kinds: tuple[int, ...]


@dataclass(frozen=True)
class Line:
    """Seconds of one algorithm: `fixed + per_byte * bytes`."""

    algorithm: str
    fixed: float
    per_byte: float

    def seconds(self, bytes: float) -> float:
        return self.fixed + self.per_byte * bytes


@dataclass(frozen=True)
class Tier:
    """A level as a group uses it.

    Args:
        rate: bytes a second that one member sends. rails: members by which an island of the level below sends at least.
        edges: hops of a ring through all members that lie here. fan_out: islands of the level below in one of this.
        peers: members that a member reaches here and not further inside.
        across: whether it connects hosts. detour: links that a message takes to any member, on average.
    """

    rate: float
    peer_latency: float
    rails: int
    edges: int
    fan_out: int
    peers: int
    across: bool
    detour: float


def shape_of(group: Sequence[int], spans: Sequence[int], kind_starts: Sequence[int]) -> Shape:
    """The shape of a group of ranks.

    Args:
        spans: ranks of an island, by level. kind_starts: the first rank of each kind of hosts.

    >>> shape_of((0, 1, 8, 9), (8, 16), (0,))
    Shape(size=4, islands=(2, 1), fewest=(2, 4), most=(2, 4), kinds=(0,))
    """
    members: Mapping[int, int] = Counter(group)
    first = [0]
    if len(kind_starts) > 1:
        first = sorted({bisect_right(kind_starts, rank) - 1 for rank in members})
    rows, inner = [], 1
    for span in spans:
        found: Counter[int] = Counter()
        if inner == 1:
            found.update([rank // span for rank in group])
        else:
            for island, count in members.items():
                found[island * inner // span] += count
        members, inner = found, span
        rows.append((len(found), min(found.values()), max(found.values())))
        if len(found) == 1:
            break
    islands, fewest, most = zip(*rows, strict=True)
    return Shape(len(group), islands, fewest, most, tuple(first))


def tiers(shape: Shape, levels: Sequence[Sequence[Level]], host: int, at_once: int | None) -> tuple[Tier, ...]:
    """The levels that connect members, innermost first.

    Args:
        levels: for each kind of hosts that takes part.
        host: ranks of a host.
        at_once: how many such groups work at the same time in the same islands; None: as many as there is room for.
    """
    found = []
    outside, least, most, below = shape.size, 1, 1, 1
    for depth, (islands, fewest, inside) in enumerate(zip(shape.islands, shape.fewest, shape.most, strict=True)):
        here = [row[depth] for row in levels]
        fan_out = math.ceil(outside / islands)
        if outside > islands:
            found.append(
                Tier(
                    min(level.rate(below, _sharers(level, below, most, inside, at_once), fan_out) for level in here),
                    max(level.peer_latency for level in here),
                    least,
                    outside - islands,
                    fan_out,
                    inside - most,
                    here[0].span > host,
                    max(fan_out / 4, 1.0) if here[0].shape == "ring" else 1.0,
                )
            )
        outside, least, most, below = islands, fewest, inside, here[0].span
    return tuple(found)


def _sharers(level: Level, below: int, members: int, inside: int, at_once: int | None) -> int:
    """How many devices send by the same links."""
    room, each = (level.span, inside) if level.shape == "pcie" else (below, members)
    return room if at_once is None else max(each, min(room, at_once * each))


def lines(
    kind: str, shape: Shape, path: Sequence[Tier], latency: float, protocols: Mapping[str, tuple[float, float]]
) -> tuple[Line, ...]:
    """What each algorithm takes."""
    return tuple(
        Line(f"{name} ({protocol})", latency + part * hops, per_byte * times)
        for name, hops, per_byte in _algorithms(kind, shape, path)
        for protocol, (part, times) in protocols.items()
    )


def measured(kind: str, size: int, level: Level) -> Line:
    """What a level's table says."""
    assert level.table
    fixed = level.table.seconds(kind, size, 0)
    return Line("measured", fixed, level.table.rates[kind] * KINDS[kind].factor(size))


def _algorithms(kind: str, shape: Shape, path: Sequence[Tier]) -> Iterator[tuple[str, float, float]]:
    """Name, seconds of all hops, seconds per byte."""
    size = shape.size
    if kind in ("all_to_all", "exchange"):
        # An exchange posts a send and a receive for every peer.
        messages, shares = (2, size - 1) if kind == "exchange" else (1, size)
        hops = sum(messages * tier.peers * tier.peer_latency for tier in path)
        yield "direct", hops, max(tier.peers / shares / tier.rate * tier.detour for tier in path)
        return
    rounds, factor = max(KINDS[kind].rounds, 1), KINDS[kind].factor(size)
    hops = sum(rounds * tier.edges * tier.peer_latency for tier in path)
    yield "ring", hops, max(factor / (tier.rails * tier.rate) for tier in path)
    if kind != "all_reduce" or shape.fewest != shape.most:
        return
    if len(path) > 1:
        yield "hierarchical", *_combined(path, tree=False)
    if path[-1].across:
        yield "tree", *_combined(path, tree=True)


def _combined(path: Sequence[Tier], *, tree: bool) -> tuple[float, float]:
    """An all_reduce level by level; between hosts along a tree if asked for."""
    hops, slowest = 0.0, 0.0
    for tier in path:
        steps, factor = tier.fan_out - 1, (tier.fan_out - 1) / tier.fan_out
        if tree and tier.across:
            steps, factor = math.ceil(math.log2(tier.fan_out)), 1.0
        hops += 2 * steps * tier.peer_latency
        slowest = max(slowest, 2 * factor / (tier.rails * tier.rate))
    return hops, slowest

"""Clusters: devices by rank, and what connects them.

In: kinds of hosts and levels of links, as data. Out: the device of a rank, the seconds of a collective in a group of
ranks, and the flat table of links (`weft.cost.links`) of a group. Ranks count through hosts: rank `r` is on host
`r // devices`. In a group with several kinds of hosts the slowest one counts.

Promised: nothing is listed by rank, so a large cluster takes no longer to make than a small one; a cost that was asked
for a group of the same shape is not worked out again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

from weft.cost.cluster.collectives import PLAIN, PROTOCOLS, Line, Shape, lines, measured, shape_of, tiers
from weft.cost.cluster.levels import Level
from weft.cost.compute.device import Device
from weft.cost.links import CALL, KINDS, Links
from weft.errors import PlanError, WeftError

LARGE = 64 << 20
"""Bytes for which the rates of a flat table are exact."""
KEPT = 8192
"""Groups, and their costs, that are kept."""


@dataclass(frozen=True)
class Hosts:
    """Hosts of one kind.

    Args:
        count: how many. device: what each of their ranks is.
        levels: their links, innermost first; the last one connects all ranks of the cluster.
    """

    count: int
    device: Device
    levels: tuple[Level, ...]


@dataclass(frozen=True)
class Cluster:
    """Devices and links.

    Args:
        devices: in each host.
        kinds: of hosts, in the order of ranks. All have levels of the same spans.
    """

    name: str
    devices: int
    kinds: tuple[Hosts, ...]

    def __post_init__(self) -> None:
        if self.devices < 1 or not self.kinds or any(kind.count < 1 for kind in self.kinds):
            raise WeftError(f"cluster {self.name} has no devices", remedy="at least one host with one device")
        self._check_spans()

    def _check_spans(self) -> None:
        spans = self.spans
        if any([level.span for level in kind.levels] != list(spans) for kind in self.kinds):
            raise WeftError(
                f"levels of {self.name}: its kinds of hosts have levels of different spans",
                remedy=f"write levels of the spans {', '.join(map(str, spans))} for each",
            )
        if not spans or spans[-1] != self.size:
            raise WeftError(
                f"levels of {self.name}: the last one spans {spans[-1] if spans else 0} of {self.size} ranks",
                remedy=f"the span of the last level is {self.size}, all hosts times their devices",
            )
        for inner, outer in pairwise(spans):
            if outer <= inner or outer % inner:
                raise WeftError(
                    f"levels of {self.name}: a span of {outer} after one of {inner}",
                    remedy="innermost first, each span a multiple of the one before",
                )
        if 1 < self.devices < self.size and self.devices not in spans:
            raise WeftError(
                f"levels of {self.name}: none spans the {self.devices} devices of a host",
                remedy=f"write a level with span: {self.devices}",
            )

    # --- devices --------------------------------------------------------------------------------------------------

    @property
    def hosts(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def size(self) -> int:
        """How many devices there are."""
        return self.hosts * self.devices

    @property
    def levels(self) -> tuple[Level, ...]:
        """Those of the first kind of hosts."""
        return self.kinds[0].levels

    @property
    def spans(self) -> tuple[int, ...]:
        return tuple(level.span for level in self.levels)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The first rank of each kind."""
        return tuple(accumulate((kind.count * self.devices for kind in self.kinds[:-1]), initial=0))

    def device(self, rank: int) -> Device:
        """What this rank is."""
        self.refuse(rank + 1)
        return self.kinds[bisect_right(self._starts, rank) - 1].device

    def fits(self, devices: int) -> bool:
        return devices <= self.size

    def refuse(self, devices: int) -> None:
        """Refuse a plan for more devices than there are."""
        if not self.fits(devices):
            raise PlanError(
                f"the plan is for {devices} devices, cluster {self.name} has {self.size}",
                remedy=f"a plan for at most {self.size} devices, or a larger cluster",
            )

    # --- links ----------------------------------------------------------------------------------------------------

    def seconds(self, kind: str, group: Sequence[int], bytes: float, at_once: int | None = None) -> float:
        """Time of one member in a collective, with `bytes` as `weft.cost.links` counts them.

        Args:
            kind: one of `weft.cost.links.KINDS`.
            group: ranks.
            at_once: how many groups of this shape work at the same time in the same hosts, and share what leaves them.
                None: as many as there is room for, which is what a plan does that cuts evenly.
        """
        shape = self._shape(_key(group))
        if kind == "local" or shape.size == 1:
            return self._local(shape).seconds(bytes)
        return min(line.seconds(bytes) for line in self._lines(kind, shape, at_once))

    def algorithm(self, kind: str, group: Sequence[int], bytes: float, at_once: int | None = None) -> str:
        """By what algorithm and protocol it is the cheapest."""
        shape = self._shape(_key(group))
        if kind == "local" or shape.size == 1:
            return "local"
        return min(self._lines(kind, shape, at_once), key=lambda line: line.seconds(bytes)).algorithm

    def level(self, group: Sequence[int]) -> Level:
        """The level of links that a group spans."""
        shape = self._shape(_key(group))
        return self.kinds[shape.kinds[0]].levels[len(shape.islands) - 1]

    def links(self, group: Sequence[int] | None = None, at_once: int | None = None) -> Links:
        """The flat table of a group, by default of all ranks.

        Each kind is exact for `LARGE` bytes; for fewer the table is too low where a kind has more hops than another.
        """
        return self._links(self._shape(_key(range(self.size) if group is None else group)), at_once)

    @cached_property
    def _shape(self) -> Callable[[Sequence[int]], Shape]:
        return lru_cache(KEPT)(self._shaped)

    @cached_property
    def _lines(self) -> Callable[[str, Shape, int | None], tuple[Line, ...]]:
        return lru_cache(KEPT)(self._priced)

    @cached_property
    def _links(self) -> Callable[[Shape, int | None], Links]:
        return lru_cache(KEPT)(self._flat)

    def _shaped(self, group: Sequence[int]) -> Shape:
        assert len(group), "a group has members"
        self.refuse(max(group) + 1)
        return shape_of(group, self.spans, self._starts)

    def _priced(self, kind: str, shape: Shape, at_once: int | None) -> tuple[Line, ...]:
        assert kind in KINDS, f"{kind} is no kind of collective"
        levels = [self.kinds[number].levels for number in shape.kinds]
        outermost = [row[len(shape.islands) - 1] for row in levels]
        if all(level.table for level in outermost):
            tables = [measured(kind, shape.size, level) for level in outermost]
            return (max(tables, key=lambda line: line.seconds(LARGE)),)
        path = tiers(shape, levels, self.devices, at_once)
        host = any(self.kinds[number].device.kind == "cpu" for number in shape.kinds)
        return lines(kind, shape, path, max(level.latency for level in outermost), PLAIN if host else PROTOCOLS)

    def _local(self, shape: Shape) -> Line:
        """A copy reads and writes."""
        kinds = [self.kinds[number] for number in shape.kinds]
        tables = [kind.levels[0].table for kind in kinds]
        return Line(
            "local",
            CALL,
            max(
                table.rates["local"] if table else 2 / kind.device.bandwidth
                for kind, table in zip(kinds, tables, strict=True)
            ),
        )

    def _flat(self, shape: Shape, at_once: int | None) -> Links:
        here = self.kinds[shape.kinds[0]].levels[len(shape.islands) - 1]
        if here.table and len(shape.kinds) == 1:
            return here.table
        name = f"{self.name}: {here.name}"
        local = self._local(shape).per_byte
        if shape.size == 1:
            return Links(name, here.latency, here.peer_latency, dict.fromkeys(KINDS, local))
        peers, rates = shape.size - 1, {"local": local}
        found = {kind: self._lines(kind, shape, at_once) for kind in KINDS if kind != "local"}
        latency = min(here.latency, *(line.fixed for row in found.values() for line in row))
        # an exchange counts each peer twice
        hop = min(line.fixed - latency for kind, row in found.items() if kind != "exchange" for line in row) / peers
        hop = min(hop, *((line.fixed - latency) / (2 * peers) for line in found["exchange"]))
        for kind, row in found.items():
            fixed = latency + hop * peers * (2 if kind == "exchange" else 1)
            large = min(line.seconds(LARGE) for line in row)
            rates[kind] = (large - fixed) / (KINDS[kind].factor(shape.size) * LARGE)
        return Links(name, latency, hop, rates)

    # --- text -----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.describe()

    def describe(self, *, sources: bool = False) -> str:
        """A few lines for people; on demand with where each number is from."""
        rows = [f"{self.name}: {_count(self.size, 'device')} in {_count(self.hosts, 'host')} of {self.devices}"]
        for kind in self.kinds:
            rows.append(f"  {_count(kind.count, 'host')} of {_device_text(kind.device)}")
            rows += _sources(kind.device.sources) if sources else []
            for level in kind.levels:
                rows.append(f"    {_level_text(level)}")
                rows += _sources(level.sources) if sources else []
        return "\n".join(rows)

    def __reduce__(self) -> tuple[Any, ...]:
        # without what was worked out
        return Cluster, (self.name, self.devices, self.kinds)


def _key(group: Sequence[int]) -> Sequence[int]:
    return group if isinstance(group, tuple | range) else tuple(group)


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _device_text(device: Device) -> str:
    best = max((rate for name, rate in device.flops.items() if name != "float8"), default=0.0)
    fastest = " and ".join(name for name, rate in device.flops.items() if rate == best)
    return (
        f"{device.name}: {device.memory / 2**30:.4g} GiB at {device.bandwidth / 1e9:,.0f} GB/s, "
        f"{best / 1e12:.4g} TFLOP/s in {fastest}"
    )


def _level_text(level: Level) -> str:
    rate = f"{level.bandwidth / 1e9:.4g} GB/s"
    shared = f"{_count(level.links, 'link')} of {rate} shared" if level.links else f"{rate} each way per device"
    costs = f"measured ({level.table.name})" if level.table else f"{level.efficiency:.0%} of it reached"
    return f"{level.name}: {_count(level.span, 'rank')}, {level.shape}, {shared}, {costs}"


def _sources(found: Any) -> list[str]:
    return [f"        {name}: {text}" for name, text in found.items()]

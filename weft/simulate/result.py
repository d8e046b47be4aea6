"""What a simulated step takes, and why.

In: what the engine wrote down. Out: a Simulation: seconds, time lines, what streams wait for, memory, throughput, the
critical path; as rows, JSON, or events for Perfetto. Promised: of each rank, `busy + exposed + bubble + host` is the
step's time; what is costly to list is listed when it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from weft.cost.compute.device import Device
from weft.simulate.critical import NOWHERE, Piece, critical_path, place_of
from weft.simulate.history import BUBBLE, COMPUTE, EXPOSED, HOST, OCCUPIED, Flight, Lane, Message
from weft.simulate.memory import Memory, memory_of
from weft.simulate.trace import Job, Place, Run

MICRO = 1e6
"""Perfetto counts microseconds."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What a stream of a rank does for a while.

    Args:
        stream: "compute", "communication" or "idle" (the compute stream waits).
        name: the operator, the kind of collective, "message"; of idle ones: what is waited for, "bubble" or "host".
    """

    stream: str
    start: float
    end: float
    name: str
    place: Place


@dataclass(frozen=True)
class Rank:
    """The step of one rank, and of those that do the same.

    Args:
        alike: how many ranks do the same, with it.
        busy: seconds in which kernels run. exposed: in which the compute stream waits for what is under way (or, on a
            `cpu`, its core works on it); of a collective, from when the rank waits, also for members that are late.
            bubble: in which it waits for what another rank has yet to compute, and the rest of the step after its own
            end. host: in which it waits for the host.
        memory: what it holds.
    """

    rank: int
    alike: int
    busy: float
    exposed: float
    bubble: float
    host: float
    memory: Memory


@dataclass(frozen=True)
class Simulation:
    """A step.

    Args:
        seconds: it takes. ranks: those that were played. devices: all of them.
        tokens, flops: of the Job. dtype: in which most is computed. peak: operations a second in it, of all devices;
            0 if that is not known of one.
    """

    seconds: float
    ranks: tuple[Rank, ...]
    devices: int
    tokens: int
    flops: int
    dtype: str
    peak: float
    lanes: tuple[Lane, ...] = field(repr=False, compare=False)

    @property
    def exposed(self) -> float:
        """The share of all devices' time in which communication is waited for."""
        return self._share([one.exposed for one in self.ranks])

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which other stages are waited for."""
        return self._share([one.bubble for one in self.ranks])

    @property
    def host(self) -> float:
        """The share of all devices' time in which the host is waited for."""
        return self._share([one.host for one in self.ranks])

    def _share(self, seconds: list[float]) -> float:
        total = sum(one.alike * took for one, took in zip(self.ranks, seconds, strict=True))
        return total / (self.seconds * self.devices) if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the model's operations over what all devices could do meanwhile; None if unknown."""
        return self.flops / (self.seconds * self.peak) if self.seconds and self.peak and self.flops else None

    @property
    def memory(self) -> int:
        """The most bytes that a rank holds."""
        return max(one.memory.peak for one in self.ranks)

    def intervals(self, rank: int) -> list[Interval]:
        """The time line of a rank that was played: first the compute stream, then communication."""
        number = [one.rank for one in self.ranks].index(rank)
        return list(_intervals(self.lanes[number], self.seconds))

    @cached_property
    def path(self) -> tuple[Piece, ...]:
        """The chain of pieces that determines the step, from 0 to its end without a gap."""
        return critical_path(self.lanes)

    def critical_path(self) -> list[tuple[str, float]]:
        """What is on the critical path by kind, line and phase, with its seconds; the longest first."""
        found: dict[str, float] = {}
        for piece in self.path:
            place = piece.place
            what = ", ".join(filter(None, (piece.kind, place.line or place.what, place.phase)))
            found[what] = found.get(what, 0.0) + piece.end - piece.start
        return sorted(found.items(), key=lambda one: -one[1])

    def table(self) -> list[dict[str, Any]]:
        """A row for each rank that was played."""
        return [
            {
                "rank": one.rank,
                "alike": one.alike,
                "busy": one.busy,
                "exposed": one.exposed,
                "bubble": one.bubble,
                "host": one.host,
                "memory": one.memory.peak,
            }
            for one in self.ranks
        ]

    def to_json(self) -> str:
        """As one JSON object, without time lines and curves."""
        memory = [
            {"rank": one.rank, "peak": one.memory.peak, "when": one.memory.when, "kinds": one.memory.kinds}
            | {"causes": [list(cause) for cause in one.memory.causes]}
            for one in self.ranks
        ]
        totals = {name: getattr(self, name) for name in ("seconds", "devices", "tokens", "flops", "dtype", "memory")}
        shares = {"exposed": self.exposed, "bubble": self.bubble, "host": self.host, "mfu": self.mfu}
        rest = {"tokens_per_second": self.tokens_per_second, "ranks": self.table(), "peaks": memory}
        return json.dumps(totals | shares | rest | {"critical_path": self.critical_path()}, indent=2)

    def chrome_trace(self) -> list[dict[str, Any]]:
        """Events for Perfetto and chrome://tracing: ranks are processes, streams threads, memory a counter."""
        return [event for one in self.ranks for event in self._events(one)]

    def _events(self, rank: Rank) -> Iterator[dict[str, Any]]:
        threads = {"compute": 0, "idle": 0, "communication": 1}
        pid = rank.rank
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {pid} of {rank.alike} alike"}}
        for name, number in (("compute", 0), ("communication", 1)):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": name}}
        for one in self.intervals(pid):
            place = {"phase": one.place.phase, "line": one.place.line, "what": one.place.what}
            times = {"ts": one.start * MICRO, "dur": (one.end - one.start) * MICRO}
            yield (
                {"ph": "X", "name": one.name, "cat": one.stream, "pid": pid, "tid": threads[one.stream]}
                | times
                | {"args": place}
            )
        for when, held in rank.memory.curve:
            yield {"ph": "C", "name": "memory", "pid": pid, "ts": when * MICRO, "args": {"bytes": held}}


def summed_up(job: Job, lanes: Sequence[Lane], device: Callable[[int], Device]) -> Simulation:
    """The Simulation of what the engine wrote down."""
    seconds = max(lane.end for lane in lanes)
    worked: dict[str, int] = {}
    for lane in lanes:
        for event in lane.events:
            if type(event) is Run and event.kernel.flops:
                kernel = event.kernel
                worked[kernel.dtype] = worked.get(kernel.dtype, 0) + kernel.flops * len(lane.trace.alike)
    dtype = max(worked, key=worked.__getitem__, default="float32")
    peaks = [device(lane.trace.rank).flops.get(dtype, 0.0) * len(lane.trace.alike) for lane in lanes]
    return Simulation(
        seconds,
        tuple(_rank(lane, seconds) for lane in lanes),
        job.devices,
        job.tokens,
        job.flops,
        dtype,
        sum(peaks) if all(peaks) else 0.0,
        tuple(lanes),
    )


def _rank(lane: Lane, seconds: float) -> Rank:
    spent, before = [0.0] * 5, 0.0
    for end, code in zip(lane.ends, lane.codes, strict=True):
        spent[code] += end - before
        before = end
    return Rank(
        lane.trace.rank,
        len(lane.trace.alike),
        spent[COMPUTE],
        spent[EXPOSED] + spent[OCCUPIED],
        spent[BUBBLE] + seconds - lane.end,
        spent[HOST],
        memory_of(lane),
    )


def _intervals(lane: Lane, seconds: float) -> Iterator[Interval]:
    before = 0.0
    for end, code, ref in zip(lane.ends, lane.codes, lane.refs, strict=True):
        if isinstance(ref, Run):
            yield Interval("compute", before, end, ref.kernel.op, ref.place)
        elif isinstance(ref, int):
            yield Interval("idle", before, end, "host", place_of(lane, ref))
        elif isinstance(ref, Flight | Message):
            yield Interval("idle", before, end, "bubble" if code == BUBBLE else ref.name, ref.place)
        before = end
    if before < seconds:
        yield Interval("idle", before, seconds, "bubble", NOWHERE)
    travelled: list[Flight | Message] = [*lane.flights, *lane.messages]
    for one in sorted(travelled, key=lambda one: one.start):
        yield Interval("communication", one.start, one.end, one.name, one.place)

"""The time table of a Schedule: when each event starts and ends.

In: a Pipeline, a Schedule, a Span per segment. Out: a Timeline. Promised: every event starts as soon as its devices are
free, the events before it in their sequences are done, and its data is there; a whole backward takes `b + w`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from weft.errors import PlanError
from weft.ir.schedule import Event, Pipeline, Schedule
from weft.order.joint import joint


@dataclass(frozen=True)
class Span:
    """How long the phases of a segment take; a backward that is not divided takes `b + w`."""

    f: float = 1
    b: float = 1
    w: float = 1

    def of(self, phase: str, whole: bool) -> float:
        """The span of a phase; `whole` says that the backward is not divided."""
        if phase == "f":
            return self.f
        if phase == "w":
            return self.w
        return self.b + self.w if whole else self.b


Spans = Mapping[str, Span]
UNIT = Span()


def span_of(spans: Spans | None, name: str) -> Span:
    """The span of a segment, unit times if it is not told."""
    return (spans or {}).get(name, UNIT)


@dataclass(frozen=True)
class Timeline:
    """When each event starts and ends, and the sequences they come from."""

    schedule: Schedule
    starts: Mapping[Event, float]
    ends: Mapping[Event, float]

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max(self.ends.values()) - min(self.starts.values())

    @cached_property
    def busy(self) -> Mapping[int, float]:
        """How long each device works."""
        found = {id(row): sum(self.ends[event] - self.starts[event] for event in row) for row in self.schedule.rows}
        return {device: found[id(row)] for device, row in sorted(self.schedule.events.items())}

    @cached_property
    def idle(self) -> float:
        """The share of all devices' time in which they wait."""
        total = self.makespan * len(self.busy)
        return 1 - sum(self.busy.values()) / total if total else 0.0


def simulate(pipeline: Pipeline, schedule: Schedule, spans: Spans | None = None, *, hop: float = 0) -> Timeline:
    """Run a schedule on paper.

    Args:
        spans: a Span per segment; unit times where it is not told.
        hop: what a value takes from one device set to another.
    """
    graph = joint(pipeline, schedule)
    order, events = graph.order(), graph.events
    if len(order) < len(events):
        raise PlanError(
            "the schedule never ends: " + " waits for ".join(map(str, graph.cycle())),
            remedy="check_schedule() draws the cycle",
        )
    split = {(event.segment, event.micro) for event in events if event.phase == "w"}
    starts, ends = [0.0] * len(events), [0.0] * len(events)
    for number in order:
        event, waits = events[number], graph.waits[number]
        if hop:
            late = (ends[one] + _hop(pipeline, events[one], event, hop) for one in waits)
            starts[number] = max(late, default=0)
        elif waits:
            starts[number] = max(ends[one] for one in waits)
        whole = event.phase != "b" or (event.segment, event.micro) not in split
        ends[number] = starts[number] + span_of(spans, event.segment).of(event.phase, whole)
    return Timeline(schedule, dict(zip(events, starts, strict=True)), dict(zip(events, ends, strict=True)))


def bound(pipeline: Pipeline, spans: Spans | None = None) -> float:
    """The most work that one device has per micro-batch: no schedule takes less for each."""
    return max(
        sum(_work(span_of(spans, one.name), one.trains) for one in pipeline.on(device)) for device in pipeline.devices
    )


def _work(span: Span, trains: bool) -> float:
    return span.f + (span.b + span.w if trains else 0)


def _hop(pipeline: Pipeline, first: Event, second: Event, hop: float) -> float:
    """What lies between two events: nothing on the same devices, or where no data passes between them."""
    if not hop or pipeline.by_name[first.segment].devices == pipeline.by_name[second.segment].devices:
        return 0
    return hop if first in pipeline.before(second) else 0

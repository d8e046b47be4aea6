"""What a Schedule takes: when each event starts and ends, and how many micro-batches each device keeps.

In: a Pipeline, a Schedule, a Span per segment. Out: a Timeline; the peak of live micro-batches per device. Promised:
every event starts as soon as its devices are free, the events before it in their sequences are done, and its data is
there; a whole backward takes `b + w`. A micro-batch of a segment that trains is live from the start of its forward to
the end of its backward, or of its weight gradients where these are put off; a device runs its events one by one, so the
peak needs no times.
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


def simulate(pipeline: Pipeline, schedule: Schedule, spans: Spans | None = None) -> Timeline:
    """Run a schedule on paper.

    Args:
        spans: a Span per segment; unit times where it is not told.
    """
    graph = joint(pipeline, schedule)
    order, events = graph.order(), graph.events
    if len(order) < len(events):
        raise PlanError(
            "the schedule never ends: " + " waits for ".join(map(str, graph.cycle())),
            remedy="check_schedule() draws the cycle",
        )
    starts, ends = [0.0] * len(events), [0.0] * len(events)
    for number in order:
        event = events[number]
        starts[number] = max((ends[one] for one in graph.waits[number]), default=0.0)
        whole = event.phase != "b" or (event.segment, event.micro) not in schedule.divided
        ends[number] = starts[number] + span_of(spans, event.segment).of(event.phase, whole)
    return Timeline(schedule, dict(zip(events, starts, strict=True)), dict(zip(events, ends, strict=True)))


def bound(pipeline: Pipeline, spans: Spans | None = None) -> float:
    """The most work that one device has per micro-batch: no schedule takes less for each."""
    return max(
        sum(_work(span_of(spans, one.name), one.trains) for one in pipeline.on(device)) for device in pipeline.devices
    )


def _work(span: Span, trains: bool) -> float:
    return span.f + (span.b + span.w if trains else 0)


def peaks(pipeline: Pipeline, schedule: Schedule) -> dict[int, int]:
    """The most micro-batches that are live at once on each device."""
    found = {id(row): _peak(pipeline, schedule, row) for row in schedule.rows}
    return {device: found[id(row)] for device, row in sorted(schedule.events.items())}


def _peak(pipeline: Pipeline, schedule: Schedule, row: tuple[Event, ...]) -> int:
    now = most = 0
    for event in row:
        if event.phase == "f" and pipeline.by_name[event.segment].trains:
            now += 1
            most = max(most, now)
        elif event.phase == "w" or (event.phase == "b" and (event.segment, event.micro) not in schedule.divided):
            now -= 1
    return most

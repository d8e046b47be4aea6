"""What a search places: the kinds of events of one micro-batch, in whole times, on as few devices as tell them apart.

In: a Pipeline and spans. Out: a Task; bounds that follow from the data alone; and a Fold, the same pipeline with one
device for all that hold the same segments, with the way back. Promised: a schedule of the folded pipeline is valid
exactly if the unfolded one is, so searches do not grow with the number of devices of a stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.ir.schedule import Pipeline, Schedule
from weft.order.timing import Spans, bound, span_of

Kind = tuple[str, str]
"""Phase and segment."""
Needs = Mapping[Kind, tuple[Kind, ...]]
FINEST = 64  # parts of a period that times are rounded to


@dataclass(frozen=True)
class Fold:
    """A pipeline on one device of each group, and the one that stands for each device."""

    pipeline: Pipeline
    stands: Mapping[int, int]

    def unfold(self, schedule: Schedule) -> Schedule:
        """The schedule on all devices."""
        return Schedule({device: schedule.events[one] for device, one in self.stands.items()})


def fold(pipeline: Pipeline) -> Fold:
    """One device for all that hold the same segments: the first of them."""
    first: dict[tuple[str, ...], int] = {}
    stands: dict[int, int] = {}
    for device in pipeline.devices:
        held = tuple(segment.name for segment in pipeline.on(device))
        stands[device] = first.setdefault(held, device)
    kept = set(first.values())
    segments = tuple(
        replace(one, devices=tuple(device for device in one.devices if device in kept)) for one in pipeline.segments
    )
    return Fold(Pipeline(segments, pipeline.microbatches), stands)


@dataclass(frozen=True)
class Task:
    """What is to be placed: kinds of events along the data, with whole spans, needs and devices."""

    spans: Mapping[Kind, int]
    needs: Needs
    devices: Mapping[Kind, tuple[int, ...]]

    @property
    def least_period(self) -> int:
        """The work of the busiest device."""
        work: dict[int, int] = {}
        for kind, devices in self.devices.items():
            for device in devices:
                work[device] = work.get(device, 0) + self.spans[kind]
        return max(1, *work.values())

    @property
    def periods(self) -> Iterator[int]:
        """From the work of the busiest device to one event at a time, in steps of a twentieth."""
        period, last = self.least_period, sum(self.spans.values())
        while period < last:
            yield period
            period += max(1, period // 20)
        yield last


def kinds(pipeline: Pipeline, spans: Spans | None, *, divided: bool = False) -> dict[Kind, float]:
    """The kinds of events of one micro-batch along the data, and how long they take.

    `divided` puts off weight gradients wherever that can be.
    """
    split = {one.name for one in pipeline.segments if divided and one.trains and one.splits}
    found: list[Kind] = [("f", segment.name) for segment in pipeline.segments]
    found += [("b", one.name) for one in reversed(pipeline.segments) if one.trains]
    found += [("w", one.name) for one in reversed(pipeline.segments) if one.name in split]
    return {(phase, name): span_of(spans, name).of(phase, name not in split) for phase, name in found}


def make_task(pipeline: Pipeline, spans: Spans | None, *, divided: bool = False) -> Task:
    """The events of one micro-batch in whole times."""
    real = kinds(pipeline, spans, divided=divided)
    unit = _unit(list(real.values()), bound(pipeline, spans))
    # What takes no time takes a little here: events of a device then have one order.
    whole = {kind: max(round(span / unit), 1) for kind, span in real.items()}
    devices = {kind: pipeline.by_name[kind[1]].devices for kind in real}
    return Task(whole, {kind: pipeline.needs(*kind) for kind in real}, devices)


def heads(spans: Mapping[Kind, float], needs: Needs) -> dict[Kind, float]:
    """The earliest start of each kind, if devices were never busy."""
    found: dict[Kind, float] = {}
    for kind in spans:
        found[kind] = max((found[need] + spans[need] for need in needs[kind]), default=0)
    return found


def tails(spans: Mapping[Kind, float], needs: Needs) -> dict[Kind, float]:
    """The least time from the start of each kind to the end of all that waits for it."""
    found = dict(spans)
    for kind in reversed(list(spans)):
        for need in needs[kind]:
            found[need] = max(found[need], spans[need] + found[kind])
    return found


def lower_bound(pipeline: Pipeline, spans: Mapping[Kind, float]) -> float:
    """No schedule is shorter: what comes before a device's first event, all its work, what comes after its last.

    Args:
        spans: the kinds of events along the data, and how long they take.
    """
    needs = {kind: pipeline.needs(*kind) for kind in spans}
    first, last = heads(spans, needs), tails(spans, needs)
    found = max(first[kind] + last[kind] for kind in spans)
    for device in pipeline.devices:
        here = [kind for kind in spans if device in pipeline.by_name[kind[1]].devices]
        work = pipeline.microbatches * sum(spans[kind] for kind in here)
        found = max(found, min(first[kind] for kind in here) + work + min(last[kind] - spans[kind] for kind in here))
    return found


def _unit(spans: Sequence[float], work: float) -> float:
    """What whole times count: the common measure of whole spans, else a fraction of the period."""
    if all(float(span).is_integer() for span in spans):
        measure = (math.gcd(*(int(span) for span in spans)) or 1) / (1 if all(spans) else 8)
        if work / measure <= FINEST:
            return measure
    return work / FINEST or 1

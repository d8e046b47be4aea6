"""The proof of a Schedule: it runs every event once, in an order that the data and all devices agree with.

In: a Pipeline, a Schedule. Out: nothing, or a PlanError that names the event that is missing, doubled or out of place,
or the cycle, and draws its neighbourhood. Promised, if it passes: every forward of every segment and micro-batch, every
backward of those that train, on each of the segment's devices exactly once; each event after its data; events that
devices share in one order on all of them; no deadlock. A `w` may stand only where the segment's backward can be
divided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise

from weft.errors import PlanError
from weft.ir.schedule import PHASES, Event, Pipeline, Schedule, Segment
from weft.order.draw import window
from weft.order.joint import joint

Row = tuple[Event, ...]


def check_schedule(pipeline: Pipeline, schedule: Schedule) -> None:
    """Refuse a schedule that cannot run."""
    _check_known(pipeline, schedule)
    _check_once(pipeline, schedule)
    _check_order(pipeline, schedule)


def expected(pipeline: Pipeline, schedule: Schedule) -> Iterator[Event]:
    """The events that a schedule must hold: forward, backward of what trains, and a `w` where any device has one."""
    for segment in pipeline.segments:
        for micro in range(pipeline.microbatches):
            yield Event("f", segment.name, micro)
            if segment.trains:
                yield Event("b", segment.name, micro)
            if (segment.name, micro) in schedule.divided:
                yield Event("w", segment.name, micro)


def _check_known(pipeline: Pipeline, schedule: Schedule) -> None:
    for device, row in _distinct(pipeline, schedule, schedule.events):
        for event in row:
            problem = _unknown(pipeline, device, event)
            if problem:
                raise _error(schedule, (event,), *problem)


def _distinct(pipeline: Pipeline, schedule: Schedule, devices: Iterable[int]) -> Iterator[tuple[int, Row]]:
    """Devices and their rows, those that hold the same segments and run one and the same row once."""
    seen: set[tuple[int, tuple[Segment, ...]]] = set()
    for device in sorted(devices):
        row = schedule.events.get(device, ())
        key = (id(row), pipeline.on(device))
        if key not in seen:
            seen.add(key)
            yield device, row


def _unknown(pipeline: Pipeline, device: int, event: Event) -> tuple[str, str] | None:
    if event.phase not in PHASES:
        return f"device {device} runs {event}, and {event.phase!r} is no phase", f"phases: {', '.join(PHASES)}"
    fault = pipeline.fault(event)
    if fault:
        return f"device {device} runs {fault[0]}", fault[1]
    if not isinstance(event.micro, int):
        return f"device {device} runs {event}, which has no number", "number the micro-batches of a schedule"
    devices = pipeline.by_name[event.segment].devices
    if device in devices:
        return None
    places = ", ".join(map(str, devices))
    return f"device {device} runs {event}, which lives on {places}", "run it where its segment lives"


def _check_once(pipeline: Pipeline, schedule: Schedule) -> None:
    wanted = list(expected(pipeline, schedule))
    for device, row in _distinct(pipeline, schedule, pipeline.devices):
        count = Counter(row)
        for event in wanted:
            if device not in pipeline.by_name[event.segment].devices or count[event] == 1:
                continue
            if count[event]:
                raise _error(schedule, (event,), f"device {device} runs {event} {count[event]} times", "run it once")
            raise _missing(schedule, device, event)


def _missing(schedule: Schedule, device: int, event: Event) -> PlanError:
    what = {"f": "forward", "b": "backward", "w": "weight gradients"}[event.phase]
    near = [
        other
        for other in schedule.events.get(device, ())
        if other.segment == event.segment and other.micro == event.micro
    ]
    elsewhere = [other for other, row in sorted(schedule.events.items()) if event in row]
    also = f" (device {elsewhere[0]} runs it)" if elsewhere else ""
    return _error(
        schedule,
        tuple(near),
        f"device {device} never runs {event}, the {what} of {event.segment!r} for micro-batch {event.micro}{also}",
        f"add {event} to device {device}",
    )


def _explain_shared(schedule: Schedule) -> None:
    """Events that two devices share stand in one order on both; said only where a circle shows that some do not."""
    distinct = {row: device for device, row in sorted(schedule.events.items(), reverse=True)}
    for first, second in combinations(sorted(distinct.values()), 2):
        both = set(schedule.events[first]) & set(schedule.events[second])
        rows = [[event for event in schedule.events[device] if event in both] for device in (first, second)]
        for one, other in zip(*rows, strict=True):
            if one != other:
                raise _error(
                    schedule,
                    (one, other),
                    f"devices {first} and {second} run {one} and {other} together, but in different orders",
                    "give events that devices share the same order on all of them",
                    only=(first, second),
                )


def _check_order(pipeline: Pipeline, schedule: Schedule) -> None:
    found = joint(pipeline, schedule).cycle()
    if not found:
        return
    _explain_shared(schedule)
    lines = [
        f"  {event} waits for {following}: {_reason(pipeline, schedule, event, following)}"
        for event, following in pairwise((*found, found[0]))
    ]
    raise _error(
        schedule,
        found,
        "the order of events contradicts the data; each waits for the next, and none can start:\n" + "\n".join(lines),
        f"run {found[-1]} earlier or {found[0]} later",
    )


def _reason(pipeline: Pipeline, schedule: Schedule, event: Event, before: Event) -> str:
    if before in pipeline.before(event):
        return "its data"
    device = next(device for device, row in sorted(schedule.events.items()) if (before, event) in set(pairwise(row)))
    return f"it stands before it on device {device}"


def _error(
    schedule: Schedule, marked: tuple[Event, ...], message: str, remedy: str, *, only: tuple[int, ...] = ()
) -> PlanError:
    rows = {device: row for device, row in schedule.events.items() if not only or device in only}
    drawn = window(rows, marked)
    return PlanError(message + (f"\n{drawn}" if drawn else ""), remedy=remedy)

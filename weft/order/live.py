"""Live micro-batches: what a Schedule keeps on each device between forward and backward.

In: a Pipeline and a Schedule. Out: the peak per device and per segment. Promised: a micro-batch of a segment that
trains is live from the start of its forward to the end of its backward, or of its weight gradients where these are put
off; a device runs its events one by one, so the peak needs no times.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import PlanError
from weft.ir.schedule import Event, Pipeline, Schedule

Limits = Mapping[int, float] | float | None


def releases(pipeline: Pipeline, schedule: Schedule) -> frozenset[Event]:
    """The events after which a micro-batch of a segment is live no more."""
    events = set(schedule.every())
    split = {(event.segment, event.micro) for event in events if event.phase == "w"}
    return frozenset(
        event
        for event in events
        if event.phase == "w" or (event.phase == "b" and (event.segment, event.micro) not in split)
    )


def peaks(pipeline: Pipeline, schedule: Schedule, weights: Mapping[str, float] | None = None) -> dict[int, float]:
    """The most that is live at once on each device.

    Args:
        weights: what one micro-batch of a segment keeps, 1 if it is not told.
    """
    ends = releases(pipeline, schedule)
    found = {id(row): _peak(pipeline, row, ends, weights or {}) for row in schedule.rows}
    return {device: found[id(row)] for device, row in sorted(schedule.events.items())}


def limit_of(limits: Limits, device: int) -> float | None:
    """What a device may keep, None if there is no limit."""
    if limits is None or isinstance(limits, int | float):
        return limits
    return limits.get(device)


def verify_limits(limits: Limits, pipeline: Pipeline) -> None:
    """A limit allows at least one micro-batch of every segment that trains."""
    for device in pipeline.devices:
        limit, needed = limit_of(limits, device), sum(one.trains for one in pipeline.on(device))
        if limit is not None and limit < needed:
            raise PlanError(
                f"device {device} may keep {limit:g} live micro-batches, but its {needed} segments keep one each",
                remedy=f"allow at least {needed}",
            )


def _peak(pipeline: Pipeline, events: tuple[Event, ...], ends: frozenset[Event], weights: Mapping[str, float]) -> float:
    now = most = 0.0
    for event in events:
        weight = weights.get(event.segment, 1)
        if event.phase == "f" and pipeline.by_name[event.segment].trains:
            now += weight
            most = max(most, now)
        elif event in ends:
            now -= weight
    return most

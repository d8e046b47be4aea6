"""Random pipelines, random schedules of them, and devices that run a schedule step by step."""

from __future__ import annotations

import random
from collections.abc import Iterable

from weft.ir.schedule import Event, Pipeline, Schedule, Segment
from weft.order.steps import project


def random_pipeline(draw: random.Random) -> Pipeline:
    """Any segments on any devices: shared, overlapping, of different sizes, with skips, some without gradient."""
    devices = draw.randint(1, 5)
    segments: list[Segment] = []
    for number in range(draw.randint(1, 7)):
        places = draw.sample(range(devices), draw.choice([1, 1, 1, draw.randint(1, devices)]))
        reads = [one.name for one in segments if draw.random() < 0.4]
        if segments and draw.random() < 0.7:
            reads.append(segments[-1].name)
        trains, splits = draw.random() < 0.8, draw.random() < 0.5
        segments.append(Segment(f"s{number}", tuple(sorted(places)), tuple(dict.fromkeys(reads)), trains, splits))
    return Pipeline(tuple(segments), draw.randint(1, 4))


def all_events(pipeline: Pipeline, draw: random.Random) -> list[Event]:
    """What must run; backwards that can be divided are, or not."""
    found: list[Event] = []
    for segment in pipeline.segments:
        for micro in range(pipeline.microbatches):
            phases = "f" + "b" * segment.trains + "w" * (segment.trains and segment.splits and draw.random() < 0.7)
            found += [Event(phase, segment.name, micro) for phase in phases]
    return found


def random_schedule(pipeline: Pipeline, draw: random.Random) -> Schedule:
    """A random order of everything that keeps the data, as the devices see it."""
    left = all_events(pipeline, draw)
    done: list[Event] = []
    while left:
        ready = [event for event in left if all(need in done for need in pipeline.before(event))]
        event = draw.choice(ready)
        left.remove(event)
        done.append(event)
    return project(pipeline, done)


def ends(pipeline: Pipeline, schedule: Schedule) -> bool:
    """Whether devices that take their events one by one come to the end: an event runs when it is next on all of its
    devices and its data is there."""
    rows = {device: list(row) for device, row in schedule.events.items()}
    done: set[Event] = set()
    moved = True
    while moved:
        moved = False
        for row in rows.values():
            if not row:
                continue
            event = row[0]
            places = pipeline.by_name[event.segment].devices
            together = all(rows[place] and rows[place][0] == event for place in places)
            if together and all(need in done for need in pipeline.before(event)):
                done.add(event)
                for place in places:
                    rows[place].pop(0)
                moved = True
    return not any(rows.values())


def ancestors(pipeline: Pipeline, event: Event) -> set[Event]:
    """Everything that an event's data comes from."""
    found: set[Event] = set()
    todo: list[Event] = [event]
    while todo:
        for need in pipeline.before(todo.pop()):
            if need not in found:
                found.add(need)
                todo.append(need)
    return found


def changed(schedule: Schedule, device: int, row: Iterable[Event]) -> Schedule:
    """The schedule with another row for one device."""
    return Schedule({**schedule.events, device: tuple(row)})

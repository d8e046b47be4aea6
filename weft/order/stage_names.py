"""Stages and blocks by the names that a plan gives them, where a pipeline's segments are named after modules.

In: a Pipeline, which segments each stage has become, and what a user said of stages: relations, rows of events, a
function of the Pipeline. Out: the same of segments, as a proven Schedule. A stage that has become several segments
means all of them: forward along the data, backward against it. Promised: a name that is neither a stage nor a segment
is refused with those that are; a schedule keeps all relations that were said with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from weft.errors import PlanError
from weft.ir.schedule import Before, Event, Pipeline, Rows, Schedule, ScheduleLike
from weft.order.check import check_schedule
from weft.order.names import make_schedule
from weft.order.relations import check_relations, expand
from weft.order.search import complete

Stages = Mapping[str, tuple[str, ...]]
"""The segments of each stage, along the data."""
WORD = re.compile(r"([FBWfbw])(\d+)(?:\((.+)\))?")
SECONDS = 30.0
"""How long the solver may take to complete relations."""


def said_schedule(
    pipeline: Pipeline, said: ScheduleLike, relations: Sequence[Before], stages: Stages, *, seconds: float = SECONDS
) -> Schedule:
    """The schedule that a plan says: by name, as rows, as a function, by relations; 1F1B if it says nothing."""
    wanted = segment_relations(pipeline, relations, stages)
    if said == "" and wanted:
        return complete(pipeline, wanted, seconds=seconds).schedule
    schedule = make_schedule(said or "1f1b", pipeline) if isinstance(said, str) else _read(pipeline, said, stages)
    check_kept(pipeline, schedule, wanted)
    return schedule


def _read(
    pipeline: Pipeline, said: Schedule | Rows | Callable[[Pipeline], Schedule | Rows], stages: Stages
) -> Schedule:
    made = said(pipeline) if callable(said) else said
    if not isinstance(made, Schedule | Mapping):
        raise PlanError(
            f"the function that orders a step returned a {type(made).__name__}",
            remedy="return a Schedule, or for each device its events",
        )
    rows = made.events if isinstance(made, Schedule) else made
    schedule = Schedule({device: _row(pipeline, device, row, stages) for device, row in sorted(rows.items())})
    check_schedule(pipeline, schedule)
    return schedule


def segment_relations(pipeline: Pipeline, relations: Iterable[Before], stages: Stages) -> tuple[Before, ...]:
    """Relations of stages as relations of their segments."""
    found: dict[Before, None] = {}
    for relation in relations:
        for first in _events(pipeline, relation.first, stages, str(relation)):
            for second in _events(pipeline, relation.second, stages, str(relation)):
                found[Before(first, second)] = None
    check_relations(pipeline, tuple(found))
    return tuple(found)


def check_kept(pipeline: Pipeline, schedule: Schedule, relations: Sequence[Before]) -> None:
    """Refuse a schedule in which a device runs events in another order than a relation says."""
    places = {device: {event: at for at, event in enumerate(row)} for device, row in schedule.events.items()}
    for first, second in expand(pipeline, relations):
        for device, place in places.items():
            if first in place and second in place and place[first] > place[second]:
                raise PlanError(
                    f"device {device} runs {second} before {first}, and the plan asks for {first} before {second}",
                    remedy="leave the relation out, or leave the schedule out: relations alone are completed to one",
                )


def _row(pipeline: Pipeline, device: int, row: str | Sequence[Event], stages: Stages) -> tuple[Event, ...]:
    here = {segment.name for segment in pipeline.on(device)}
    found: list[Event] = []
    events = _words(pipeline, device, row, stages) if isinstance(row, str) else row
    for at, event in enumerate(events):
        place = f"device {device}, event {at}"
        meant = _events(pipeline, event, stages, place)
        held = [one for one in meant if one.segment in here]
        found += held or meant
    return tuple(found)


def _words(pipeline: Pipeline, device: int, row: str, stages: Stages) -> list[Event]:
    """The events of a row such as `F0 F1(a) B0`; a device with one stage need not name it."""
    here = [segment.name for segment in pipeline.on(device)]
    held = [stage for stage, segments in stages.items() if not set(segments).isdisjoint(here)]
    named = {segment for segments in stages.values() for segment in segments}
    held += [name for name in here if name not in named]
    found = []
    # a name may hold blanks: they are inside brackets
    for at, word in enumerate(re.findall(r"[^\s(]+(?:\([^)]*\))?", row)):
        place = f"device {device}, event {at}"
        match = WORD.fullmatch(word)
        if match is None:
            raise PlanError(f"{word!r} is no event", place=place, remedy="write F0, B3, W3, or F0(stage)")
        phase, micro, name = match.groups()
        if name is None and len(held) != 1:
            raise PlanError(
                f"{word!r} does not say which stage it runs; device {device} holds {', '.join(held) or 'none'}",
                place=place,
                remedy=f"write {word}(stage)",
            )
        found.append(Event(phase.lower(), name or held[0], int(micro)))
    return found


def _events(pipeline: Pipeline, event: Event, stages: Stages, place: str) -> list[Event]:
    """The events of segments that an event of a stage means."""
    names = stages.get(event.segment)
    if names is None:
        if event.segment not in pipeline.by_name:
            known = ", ".join(stages or pipeline.by_name)
            raise PlanError(f"no stage is called {event.segment!r}", place=place, remedy=f"stages: {known}")
        names = (event.segment,)
    able = [name for name in names if pipeline.by_name[name].has(event.phase)] or list(names)
    return [Event(event.phase, name, event.micro) for name in (able if event.phase == "f" else reversed(able))]

"""Schedules that users write: a compact row per device, or lists of events.

In: for each device a row such as `F0 F1 B0 F2 B1 B2` (`F0(embed)` where the device holds several segments), or events.
Out: a Schedule, proven. Promised: what `str(schedule)` prints is read back to the same schedule; a word that is no
event is refused with its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from weft.errors import PlanError
from weft.ir.schedule import Event, Pipeline, Schedule
from weft.order.check import check_schedule
from weft.order.live import Limits

WORD = re.compile(r"([FBWfbw])(\d+)(?:\((.+)\))?")


def read_schedule(pipeline: Pipeline, rows: Mapping[int, str | Sequence[Event]], *, limits: Limits = None) -> Schedule:
    """The schedule that a user wrote, checked."""
    schedule = Schedule(
        {
            device: _read(pipeline, device, row) if isinstance(row, str) else tuple(row)
            for device, row in sorted(rows.items())
        }
    )
    check_schedule(pipeline, schedule, limits=limits)
    return schedule


def _read(pipeline: Pipeline, device: int, row: str) -> tuple[Event, ...]:
    return tuple(_event(pipeline, device, word, number) for number, word in enumerate(words_of(row)))


def words_of(row: str) -> list[str]:
    """The words of a row. A segment's name may hold blanks: they are inside brackets."""
    return re.findall(r"[^\s(]+(?:\([^)]*\))?", row)


def _event(pipeline: Pipeline, device: int, word: str, number: int) -> Event:
    place = f"device {device}, event {number}"
    found = WORD.fullmatch(word)
    if found is None:
        raise PlanError(f"{word!r} is no event", place=place, remedy="write F0, B3, W3, or F0(segment)")
    phase, micro, name = found.groups()
    here = [segment.name for segment in pipeline.on(device)]
    if name is None and len(here) != 1:
        held = ", ".join(here) or "none"
        raise PlanError(
            f"{word!r} does not say which segment it runs; device {device} holds {held}",
            place=place,
            remedy=f"write {word}(segment)",
        )
    return Event(phase.lower(), name or here[0], int(micro))

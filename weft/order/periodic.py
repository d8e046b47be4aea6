"""The way into a repeating pattern and out of it.

In: a Pipeline, a Task, relations for every micro-batch, a Pattern that keeps them. Out: the schedule that runs into it
and out of it as fast as the solver finds, for any number of micro-batches. Promised: the size of the problem does not
grow with the number of micro-batches.

As in Tessel (Lin et al., 2024) a schedule of many micro-batches is a repetend with a warm-up and a cool-down. Here the
repetend is a modulo schedule (`pattern.py`). The window that shows every kind once, at r(e), belongs to micro-batch
c(e) = max k - k(e): smaller ones are warm-up, larger ones cool-down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.ir.schedule import Event, Pipeline
from weft.order.model import Model
from weft.order.pattern import Edge, Pattern
from weft.order.task import Kind, Task


@dataclass(frozen=True)
class Stretch:
    """A pattern with its way in and out, solved for `few` micro-batches."""

    starts: Mapping[Event, int]
    pattern: Pattern
    few: int

    def unroll(self, microbatches: int) -> dict[Event, int]:
        """Start times for at least `few` micro-batches."""
        more, period = microbatches - self.few, self.pattern.period
        window = windows(self.pattern)
        found: dict[Event, int] = {}
        for (phase, name), number in window.items():
            first = self.starts[Event(phase, name, number)]
            for micro in range(microbatches):
                if micro < number:
                    start = self.starts[Event(phase, name, micro)]
                elif micro <= number + more:
                    start = first + (micro - number) * period
                else:
                    start = self.starts[Event(phase, name, micro - more)] + more * period
                found[Event(phase, name, micro)] = start
        return found


def windows(pattern: Pattern) -> dict[Kind, int]:
    """Which micro-batch of each kind runs in the window."""
    turns = {kind: start // pattern.period for kind, start in pattern.starts.items()}
    most = max(turns.values())
    return {kind: most - turn for kind, turn in turns.items()}


def stretch(
    pipeline: Pipeline,
    task: Task,
    links: Sequence[Edge],
    pattern: Pattern,
    *,
    seconds: float,
    workers: int,
) -> Stretch | None:
    """The fastest way into a pattern and out of it that is found in the time."""
    window = windows(pattern)
    few = max(window.values()) + 1
    small = replace(pipeline, microbatches=few)
    horizon = (few - 1) * pattern.period + pattern.length
    model = Model(small, task, horizon)
    moment = model.model.new_int_var(0, horizon, "window")
    for (phase, name), number in window.items():
        start = pattern.starts[phase, name] % pattern.period
        model.model.add(model.starts[Event(phase, name, number)] == moment + start)
    for first, second in _crossings(task, links, pattern, window, few):
        left = model.starts[first] if isinstance(first, Event) else moment + first
        right = model.starts[second] if isinstance(second, Event) else moment + second
        span = model.span(first) if isinstance(first, Event) else 0
        model.model.add(left + span <= right)
    _add_sides(model, pipeline, task, window)
    model.hint({event: pattern.at(event) for event in model.starts})
    answer = model.solve(seconds, workers=workers)
    return None if answer.starts is None else Stretch(answer.starts, pattern, few)


def _add_sides(model: Model, pipeline: Pipeline, task: Task, window: Mapping[Kind, int]) -> None:
    """On each device the warm-up before the window, the cool-down after it."""
    for device in pipeline.devices:
        kinds = [kind for kind, devices in task.devices.items() if device in devices]
        inside = [Event(phase, name, window[phase, name]) for phase, name in kinds]
        for phase, name in kinds:
            for micro in range(model.pipeline.microbatches):
                event = Event(phase, name, micro)
                for one in inside:
                    if micro < window[phase, name]:
                        model.before(event, one)
                    elif micro > window[phase, name]:
                        model.before(one, event)


def _crossings(
    task: Task, links: Sequence[Edge], pattern: Pattern, window: Mapping[Kind, int], few: int
) -> Iterator[tuple[Event | int, Event | int]]:
    """What must be kept between warm-up, repeated windows and cool-down: events, or times after the window's start."""
    for link in links:
        first, second = window[link.first], window[link.second]
        for micro in range(few):
            after = micro + link.shift
            if micro < first and after >= second:
                yield (
                    Event(*link.first, micro),
                    pattern.starts[link.second] % pattern.period + (after - second) * pattern.period,
                )
            elif micro < first and after >= 0:
                yield Event(*link.first, micro), Event(*link.second, after)
            before = micro - link.shift
            if micro > second and before <= first:
                ended = pattern.starts[link.first] % pattern.period + task.spans[link.first]
                yield ended - (first - before) * pattern.period, Event(*link.second, micro)
            elif micro > second and before < few:
                yield Event(*link.first, before), Event(*link.second, micro)

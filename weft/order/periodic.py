"""The best repeating pattern by CP-SAT, and its way in and out.

In: a Pipeline, a Task, relations for every micro-batch, limits of live micro-batches. Out: a Pattern with the shortest
period, then the shortest length, that keeps them; and the schedule that runs into it and out of it as fast as the
solver finds, for any number of micro-batches. Promised: the size of both problems does not grow with the number of
micro-batches.

As in Tessel (Lin et al., 2024) a schedule of many micro-batches is a repetend with a warm-up and a cool-down. Here the
repetend is a modulo schedule: event e of micro-batch m runs at r(e) + (k(e) + m) * period. The window that shows every
kind once, at r(e), belongs to micro-batch c(e) = max k - k(e): smaller ones are warm-up, larger ones cool-down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.ir.schedule import Before, Event, Micro, Pipeline
from weft.order.live import Limits, limit_of
from weft.order.model import Model, make_solver
from weft.order.pattern import Kind, Pattern, Task, place

HINT_TRIES = 2_000
MOST_PERIODS = 12  # a pattern is at most so many periods long


@dataclass(frozen=True)
class Edge:
    """`first` of micro-batch m ends before `second` of micro-batch m + shift starts."""

    first: Kind
    second: Kind
    shift: int = 0


def edges(task: Task, relations: Sequence[Before]) -> tuple[Edge, ...]:
    """Data and relations, for every micro-batch."""
    found = [Edge(need, kind) for kind, needs in task.needs.items() for need in needs]
    for relation in relations:
        first, second = relation.first, relation.second
        assert isinstance(first.micro, Micro) and isinstance(second.micro, Micro), "said for every micro-batch"
        shift = second.micro.offset - first.micro.offset
        found.append(Edge((first.phase, first.segment), (second.phase, second.segment), shift))
    return tuple(dict.fromkeys(found))


def best_pattern(
    pipeline: Pipeline, task: Task, links: Sequence[Edge], limits: Limits, *, period: int, seconds: float, workers: int
) -> Pattern | None:
    """The shortest pattern at a period; None if there is none, or none was found in the time."""
    from ortools.sat.python import cp_model  # noqa: PLC0415

    model = cp_model.CpModel()
    residues = {kind: model.new_int_var(0, period - 1, f"r {kind}") for kind in task.spans}
    turns = {kind: model.new_int_var(0, MOST_PERIODS + len(task.spans), f"k {kind}") for kind in task.spans}
    starts = {kind: residues[kind] + period * turns[kind] for kind in task.spans}
    model.add(residues[next(iter(task.spans))] == 0)
    for link in links:
        late = starts[link.second] + period * link.shift
        model.add(starts[link.first] + task.spans[link.first] <= late)
    _add_circle(model, pipeline, task, residues, period)
    _add_lives(model, pipeline, task, (residues, turns, starts), limits, period)
    length = model.new_int_var(0, period * (MOST_PERIODS + len(task.spans) + 1), "length")
    for kind in task.spans:
        model.add(starts[kind] + task.spans[kind] <= length)
    model.minimize(length)
    known = place(task, period, tries=HINT_TRIES)
    for kind, start in known.starts.items() if known else ():
        model.add_hint(residues[kind], start % period)
        model.add_hint(turns[kind], start // period)
    solver = make_solver(seconds, workers)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    found = {kind: int(solver.value(starts[kind])) for kind in task.spans}
    return Pattern(found, period, int(solver.value(length)))


def _add_circle(model: Any, pipeline: Pipeline, task: Task, residues: Mapping[Kind, Any], period: int) -> None:
    """On no device two kinds at the same moment of the period: each stands there twice, a period apart."""
    for device in pipeline.devices:
        twice = [
            model.new_fixed_size_interval_var(residues[kind] + turn * period, task.spans[kind], f"{kind} {turn}")
            for kind, devices in task.devices.items()
            for turn in (0, 1)
            if device in devices
        ]
        model.add_no_overlap(twice)


def _add_lives(
    model: Any,
    pipeline: Pipeline,
    task: Task,
    times: tuple[Mapping[Kind, Any], Mapping[Kind, Any], Mapping[Kind, Any]],
    limits: Limits,
    period: int,
) -> None:
    """When a forward starts, no more is live on its device than allowed.

    Of a segment that starts at (k, r) and ends its life at (q, e), q - k + [r <= x] - [e <= x] micro-batches are live
    at the moment x of a period.
    """
    residues, turns, starts = times
    for device in pipeline.devices:
        limit = limit_of(limits, device)
        trained = [one.name for one in pipeline.on(device) if one.trains]
        if limit is None:
            continue
        lives: dict[str, tuple[Any, Any]] = {}
        for name in trained:
            release: Kind = ("w", name) if ("w", name) in task.spans else ("b", name)
            whole = model.new_int_var(0, 2 * (MOST_PERIODS + len(task.spans)), f"q {name} {device}")
            rest = model.new_int_var(0, period - 1, f"e {name} {device}")
            model.add(starts[release] + task.spans[release] == period * whole + rest)
            lives[name] = (whole, rest)
        for name in trained:
            now = residues["f", name]
            counts = []
            for other in trained:
                whole, rest = lives[other]
                begun = 1 if other == name else _at_most(model, residues["f", other], now)
                counts.append(whole - turns["f", other] + begun - _at_most(model, rest, now))
            model.add(sum(counts) <= int(limit))


def _at_most(model: Any, left: Any, right: Any) -> Any:
    """Whether one moment is no later than another."""
    truth = model.new_bool_var("")
    model.add(left <= right).only_enforce_if(truth)
    model.add(left > right).only_enforce_if(truth.negated())
    return truth


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
    limits: Limits,
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
    model.add_limits(limits)
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
    model.hint({event: _at(pattern, event) for event in model.starts})
    answer = model.solve(seconds, workers=workers)
    return None if answer.starts is None else Stretch(answer.starts, pattern, few)


def _at(pattern: Pattern, event: Event) -> int:
    return pattern.starts[event.phase, event.segment] + event.number * pattern.period


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
                    pattern.starts[link.second] % pattern.period + _periods(pattern, after - second),
                )
            elif micro < first and after >= 0:
                yield Event(*link.first, micro), Event(*link.second, after)
            before = micro - link.shift
            if micro > second and before <= first:
                ended = pattern.starts[link.first] % pattern.period + task.spans[link.first]
                yield ended - _periods(pattern, first - before), Event(*link.second, micro)
            elif micro > second and before < few:
                yield Event(*link.first, before), Event(*link.second, micro)


def _periods(pattern: Pattern, count: int) -> int:
    return count * pattern.period

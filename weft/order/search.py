"""The shortest schedule: relations completed, or a free search.

In: a Pipeline, relations between events, spans, a time limit. Out: Found, a proven Schedule. Promised: never longer
than a named schedule that keeps the same relations; what contradicts itself is refused, with a smallest set of
relations that does. Few micro-batches are solved whole; for many a repeating pattern is found and unrolled, with a
warm-up and a cool-down of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.errors import PlanError
from weft.ir.schedule import PHASES, Before, Event, Pipeline, Schedule
from weft.order.check import check_schedule
from weft.order.model import Model, in_order, make_solver, total
from weft.order.names import SCHEDULES, make_schedule
from weft.order.pattern import Edge, Pattern, best_pattern, edges, one_by_one
from weft.order.periodic import stretch, windows
from weft.order.relations import check_relations, expand
from weft.order.task import Task, fold, kinds, lower_bound, make_task
from weft.order.timing import Span, Spans, simulate

WHOLE = 300  # events that are solved whole


@dataclass(frozen=True)
class Found:
    """A schedule, its makespan, whether none shorter exists (in whole times), how it was found and in what time."""

    schedule: Schedule
    makespan: float
    proven: bool
    method: str
    seconds: float


Entry = tuple[float, Schedule, str, bool]  # makespan, schedule, how it was found, whether it is proven


@dataclass(frozen=True)
class Wish:
    """What a search is asked for."""

    pipeline: Pipeline
    relations: tuple[Before, ...]
    spans: Spans | None
    task: Task
    workers: int

    @property
    def divided(self) -> bool:
        """Whether weight gradients are put off anywhere."""
        return any(phase == "w" for phase, _ in self.task.spans)

    def span(self, event: Event) -> float:
        """How long an event takes, in whole times."""
        return self.task.spans[event.phase, event.segment]

    @property
    def repeats(self) -> bool:
        """Whether all relations speak of every micro-batch."""
        return all(not isinstance(one.first.micro, int) for one in self.relations)


def complete(
    pipeline: Pipeline,
    relations: Sequence[Before] = (),
    *,
    spans: Spans | None = None,
    seconds: float = 60,
    workers: int = 1,
    named: bool = True,
) -> Found:
    """The shortest schedule that keeps the relations; without relations a free search.

    Args:
        seconds: how long the solver may take.
        workers: threads of the solver; with one the same input gives the same schedule, unless time runs out.
        named: also look at the named schedules, and begin from the best of them.
    """
    began = time.monotonic()
    check_relations(pipeline, relations)
    divided = any(segment.splits and segment.trains for segment in pipeline.segments)
    folded = fold(pipeline)
    task = make_task(folded.pipeline, spans, divided=divided)
    wish = Wish(folded.pipeline, tuple(relations), spans, task, workers)
    found = _search(wish, began + seconds, named=named)
    if not found:
        raise PlanError(
            f"no schedule was found in {seconds:g} s", remedy="give the search more time, or fewer micro-batches"
        )
    makespan, short, method, proven = min(found, key=lambda entry: (entry[0], not entry[3]))
    schedule = folded.unfold(short)
    check_schedule(pipeline, schedule)
    return Found(schedule, makespan, proven or _is_least(wish, makespan), method, time.monotonic() - began)


def _search(wish: Wish, end: float, *, named: bool) -> list[Entry]:
    """All that is found: named schedules, and unless one of them is the shortest, what the solver says."""
    found = list(_named(wish)) if named else []
    best = min(found, key=lambda entry: entry[0], default=None)
    if best is not None and _is_least(wish, best[0]):
        return found
    solved = [] if _is_small(wish) else _repeat(wish, end)
    if not solved and (_is_small(wish) or not found):
        solved = _whole(wish, best, end)
    return found + solved


def _is_least(wish: Wish, makespan: float) -> bool:
    """Whether no schedule at all can be shorter."""
    least = lower_bound(wish.pipeline, kinds(wish.pipeline, wish.spans, divided=wish.divided))
    return makespan <= least * (1 + 1e-9)


def _is_small(wish: Wish) -> bool:
    return not wish.repeats or wish.pipeline.microbatches * len(wish.task.spans) <= WHOLE


def _named(wish: Wish) -> Iterator[Entry]:
    """Named schedules that keep the relations."""
    for name in (name for name, one in SCHEDULES.items() if one.tried):
        try:
            schedule = make_schedule(name, wish.pipeline, spans=wish.spans)
        except PlanError:
            # This name does not fit the pipeline; others may.
            continue
        if _keeps(wish, schedule):
            yield _entry(wish, schedule, name, False)


def _entry(wish: Wish, schedule: Schedule, method: str, proven: bool) -> Entry:
    return simulate(wish.pipeline, schedule, wish.spans).makespan, schedule, method, proven


def _keeps(wish: Wish, schedule: Schedule) -> bool:
    """Whether the time table of a schedule keeps all relations."""
    timeline = simulate(wish.pipeline, schedule, wish.spans)
    ends, starts = timeline.ends, timeline.starts
    pairs = expand(wish.pipeline, wish.relations)
    return all(one in ends and other in starts and ends[one] <= starts[other] for one, other in pairs)


def _whole(wish: Wish, best: Entry | None, end: float) -> list[Entry]:
    """All micro-batches at once, from the best schedule that is known."""
    known = _whole_times(wish, best[1] if best else one_by_one(wish.task).unroll(wish.pipeline))
    times = [start + wish.span(event) for event, start in known.items()]
    horizon = max(times) if best else total(wish.task, wish.pipeline.microbatches)
    # Relations may force micro-batches out of their order: only then is it given up.
    for ordered in (True, False) if wish.relations else (True,):
        model = Model(wish.pipeline, wish.task, round(horizon), ordered=ordered)
        for first, second in expand(wish.pipeline, wish.relations):
            model.before(first, second)
        model.hint(known)
        model.at_least(round(lower_bound(wish.pipeline, wish.task.spans)))
        answer = model.solve(max(end - time.monotonic(), 0.1), workers=wish.workers)
        if answer.starts is not None:
            schedule = in_order(wish.pipeline, wish.task, answer.starts)
            return [_entry(wish, schedule, "solver", answer.proven)]
    return _one_by_one(wish)


def _one_by_one(wish: Wish) -> list[Entry]:
    """One micro-batch after the other: long, but it fits any pipeline."""
    schedule = one_by_one(wish.task).unroll(wish.pipeline)
    return [_entry(wish, schedule, "one by one", False)] if _is_valid(wish, schedule) else []


def _whole_times(wish: Wish, schedule: Schedule) -> dict[Event, float]:
    """Start times of a schedule in whole times, each weight gradient right behind a backward that does both."""
    split = {name for phase, name in wish.task.spans if phase == "w"}
    rows: dict[int, list[Event]] = {device: [] for device in schedule.events}
    for device, row in schedule.events.items():
        for event in row:
            rows[device].append(event)
            if event.phase == "b" and event.segment in split and (event.segment, event.micro) not in schedule.divided:
                rows[device].append(replace(event, phase="w"))
    spans = {
        one.name: Span(*(wish.task.spans.get((phase, one.name), 0) for phase in PHASES))
        for one in wish.pipeline.segments
    }
    divided = Schedule({device: tuple(row) for device, row in rows.items()})
    return dict(simulate(wish.pipeline, divided, spans).starts)


def _repeat(wish: Wish, end: float) -> list[Entry]:
    """A repeating pattern at the shortest period that has one, unrolled with a way in and a way out."""
    links = edges(wish.task, wish.relations)
    for period in wish.task.periods:
        left = end - time.monotonic()
        if left <= 0:
            break
        solver = make_solver(left / 3, wish.workers)
        pattern = best_pattern(wish.pipeline, wish.task, links, period=period, solver=solver)
        found = _unrolled(wish, pattern, links, end) if pattern else []
        if found:
            return found
    return _one_by_one(wish)


def _unrolled(wish: Wish, pattern: Pattern, links: Sequence[Edge], end: float) -> list[Entry]:
    """The pattern as it is, and with a way in and out of its own; those that keep everything."""
    schedules = [(pattern.unroll(wish.pipeline), "pattern")]
    few = max(windows(pattern).values()) + 1
    left = end - time.monotonic()
    if few <= wish.pipeline.microbatches and left > 0:
        longer = stretch(wish.pipeline, wish.task, links, pattern, seconds=left, workers=wish.workers)
        if longer is not None:
            starts = longer.unroll(wish.pipeline.microbatches)
            schedules.append((in_order(wish.pipeline, wish.task, starts), "stretched pattern"))
    return [_entry(wish, one, method, False) for one, method in schedules if _is_valid(wish, one)]


def _is_valid(wish: Wish, schedule: Schedule) -> bool:
    try:
        check_schedule(wish.pipeline, schedule)
    except PlanError:
        return False
    return _keeps(wish, schedule)

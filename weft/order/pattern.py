"""Repeating patterns: one micro-batch's events placed so that copies of it, one period apart, never meet on a device.

In: a Pipeline, spans, relations for every micro-batch. Out: a Pattern with the shortest period, then the shortest
length, that keeps them, or the Schedule that it unrolls to for any number of micro-batches.
Promised: the unrolled schedule is valid by construction (all events are sorted by time, and data flows within one
micro-batch only); the size of the problem does not grow with the number of micro-batches.

This is modulo scheduling, the steady state of a software pipeline: event e of micro-batch m starts at r(e) + (k(e) + m)
* period; no two events of a device may share a moment modulo the period. A period as long as the work of the busiest
device leaves that device no idle time. `interlaced` is such a pattern: blocks on all devices take the same moments
everywhere, and the stages' forwards and backwards fill what lies between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.ir.schedule import Before, Event, Micro, Pipeline, Schedule
from weft.order.model import make_solver
from weft.order.steps import project
from weft.order.task import Kind, Task, fold, make_task
from weft.order.timing import Spans

MOST_PERIODS = 12  # a pattern is at most so many periods long
EFFORT = 2.0
"""Of the solver for a named schedule, in its own measure, about seconds: the same pattern on any machine."""


@dataclass(frozen=True)
class Pattern:
    """When each kind of event (phase, segment) of micro-batch 0 starts, and after how long the next one follows."""

    starts: Mapping[Kind, int]
    period: int
    length: int

    def at(self, event: Event) -> int:
        """When an event of any micro-batch starts."""
        return self.starts[event.phase, event.segment] + event.number * self.period

    def unroll(self, pipeline: Pipeline) -> Schedule:
        """The schedule of all micro-batches."""
        events = [Event(*kind, micro) for kind in self.starts for micro in range(pipeline.microbatches)]
        # sorting keeps the order along the data among events of one time
        return project(pipeline, sorted(events, key=self.at))


@dataclass(frozen=True)
class Edge:
    """`first` of micro-batch m ends before `second` of micro-batch m + shift starts."""

    first: Kind
    second: Kind
    shift: int = 0


def interlaced(pipeline: Pipeline, *, spans: Spans | None = None) -> Schedule:
    """Blocks that live on several stages' devices woven into the stages, without idle devices in the steady state."""
    return find_pattern(pipeline, spans).unroll(pipeline)


def find_pattern(pipeline: Pipeline, spans: Spans | None = None) -> Pattern:
    """The shortest pattern with the shortest period that the solver finds."""
    folded = fold(pipeline).pipeline
    task = make_task(folded, spans)
    for period in task.periods:
        found = best_pattern(folded, task, edges(task), period=period, solver=make_solver(effort=EFFORT))
        if found is not None:
            return replace(found, starts=_late(task, found))
    return one_by_one(task)


def one_by_one(task: Task) -> Pattern:
    """One event at a time, and each micro-batch after the one before."""
    starts, now = dict[Kind, int](), 0
    for kind, span in task.spans.items():
        starts[kind] = now
        now += span
    return Pattern(starts, now, now)


def edges(task: Task, relations: Sequence[Before] = ()) -> tuple[Edge, ...]:
    """Data and relations, for every micro-batch."""
    found = [Edge(need, kind) for kind, needs in task.needs.items() for need in needs]
    for relation in relations:
        first, second = relation.first, relation.second
        assert isinstance(first.micro, Micro) and isinstance(second.micro, Micro), "said for every micro-batch"
        shift = second.micro.offset - first.micro.offset
        found.append(Edge((first.phase, first.segment), (second.phase, second.segment), shift))
    return tuple(dict.fromkeys(found))


def best_pattern(pipeline: Pipeline, task: Task, links: Sequence[Edge], *, period: int, solver: Any) -> Pattern | None:
    """The shortest pattern at a period; None if there is none, or the solver finds none."""
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
    length = model.new_int_var(0, period * (MOST_PERIODS + len(task.spans) + 1), "length")
    for kind in task.spans:
        model.add(starts[kind] + task.spans[kind] <= length)
    model.minimize(length)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    found = {kind: int(solver.value(starts[kind])) for kind in task.spans}
    return Pattern(found, period, int(solver.value(length)))


def _late(task: Task, pattern: Pattern) -> dict[Kind, int]:
    """The same moments, each forward as many periods later as what follows it allows: less is live at once."""
    found = dict(pattern.starts)
    for kind in reversed(list(found)):
        after = [found[one] for one in found if kind in task.needs[one]]
        if kind[0] == "f" and after:
            found[kind] += (min(after) - found[kind] - task.spans[kind]) // pattern.period * pattern.period
    return found


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

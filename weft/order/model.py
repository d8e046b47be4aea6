"""The schedule of a few micro-batches as a CP-SAT model.

In: a Pipeline, a Task (whole spans of the kinds of events), pairs of related events. Out: start times of all events,
the shortest that the solver finds in its time. Promised: an answer keeps data, devices and relations; micro-batches of
one kind run in order unless relations forbid it, which loses nothing: sorting the starts of each kind keeps every
dependency.

OR-Tools is loaded when a model is made, not before: it takes a moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.ir.schedule import Event, Pipeline, Schedule
from weft.order.steps import project
from weft.order.task import Task, heads, tails

SEED = 1


@dataclass(frozen=True)
class Answer:
    """What a solve ended with: start times (none if it found none), and whether nothing shorter exists."""

    starts: Mapping[Event, int] | None
    proven: bool


class Model:
    """Start times of all events of a pipeline as variables."""

    def __init__(self, pipeline: Pipeline, task: Task, horizon: int, *, ordered: bool = True) -> None:
        from ortools.sat.python import cp_model  # noqa: PLC0415

        self.cp = cp_model
        self.pipeline, self.task = pipeline, task
        self.model = cp_model.CpModel()
        self.starts: dict[Event, Any] = {}
        self.end = self.model.new_int_var(0, horizon, "end")
        earliest, left = heads(task.spans, task.needs), tails(task.spans, task.needs)
        for kind in task.spans:
            first = round(earliest[kind])
            last = max(horizon - round(left[kind]), first)
            for micro in range(pipeline.microbatches):
                event = Event(*kind, micro)
                self.starts[event] = self.model.new_int_var(first, last, str(event))
        self._add_data()
        self._add_devices()
        if ordered:
            self._add_order()

    def span(self, event: Event) -> int:
        """The whole span of an event."""
        return self.task.spans[event.phase, event.segment]

    def ends(self, event: Event) -> Any:
        """The end of an event, as an expression."""
        return self.starts[event] + self.span(event)

    def before(self, first: Event, second: Event) -> None:
        """`first` ends before `second` starts."""
        self.model.add(self.ends(first) <= self.starts[second])

    def at_least(self, bound: int) -> None:
        """A known lower bound of the makespan."""
        self.model.add(self.end >= bound)

    def hint(self, starts: Mapping[Event, float]) -> None:
        """Start times to begin from."""
        for event, start in starts.items():
            if event in self.starts:
                self.model.add_hint(self.starts[event], round(start))

    def solve(self, seconds: float, *, workers: int) -> Answer:
        """The shortest schedule found in the time."""
        self.model.minimize(self.end)
        solver = make_solver(seconds, workers)
        status = solver.solve(self.model)
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return Answer(None, False)
        starts = {event: int(solver.value(variable)) for event, variable in self.starts.items()}
        return Answer(starts, status == self.cp.OPTIMAL)

    def _add_data(self) -> None:
        for event in self.starts:
            for need in self.pipeline.before(event):
                self.before(need, event)
            self.model.add(self.ends(event) <= self.end)

    def _add_devices(self) -> None:
        intervals = {
            event: self.model.new_fixed_size_interval_var(start, self.span(event), f"run {event}")
            for event, start in self.starts.items()
        }
        for device in self.pipeline.devices:
            self.model.add_no_overlap(
                [one for event, one in intervals.items() if device in self.task.devices[event.phase, event.segment]]
            )

    def _add_order(self) -> None:
        for phase, name in self.task.spans:
            for micro in range(1, self.pipeline.microbatches):
                self.before(Event(phase, name, micro - 1), Event(phase, name, micro))


def in_order(pipeline: Pipeline, task: Task, starts: Mapping[Event, int]) -> Schedule:
    """The schedule of start times: each device by time, what takes no time along the data."""
    ranks = {kind: number for number, kind in enumerate(task.spans)}
    events = sorted(starts, key=lambda event: (starts[event], ranks[event.phase, event.segment], event.number))
    return project(pipeline, events)


def total(task: Task, microbatches: int) -> int:
    """A horizon that any order fits in: one event after the other."""
    return max(microbatches * sum(task.spans.values()), 1)


def make_solver(seconds: float = math.inf, workers: int = 1, *, effort: float = math.inf) -> Any:
    """A solver that gives the same answer again, and leaves Ctrl-C to Python.

    Args:
        effort: the most that it may do, in a measure of its own that does not depend on the machine.
    """
    from ortools.sat.python import cp_model  # noqa: PLC0415

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.max_deterministic_time = effort
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = SEED
    # it would put the system's own handler in place afterwards, and the next Ctrl-C would kill the process
    solver.parameters.catch_sigint_signal = False
    return solver

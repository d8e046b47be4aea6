"""Repeating patterns: one micro-batch's events placed so that copies of it, one period apart, never meet on a device.

In: a Pipeline, spans, a period. Out: a Pattern, or the Schedule that it unrolls to for any number of micro-batches.
Promised: the unrolled schedule is valid by construction (all events are sorted by time, and data flows within one
micro-batch only). The search is exact branch and bound on whole times with a fixed number of tries, so the same input
gives the same pattern.

This is modulo scheduling, the steady state of a software pipeline: event e of micro-batch m starts at t(e) + m *
period; no two events of a device may share a moment modulo the period. A period as long as the work of the busiest
device leaves that device no idle time. `interlaced` is such a pattern: blocks on all devices take the same moments
everywhere, and the stages' forwards and backwards fill what lies between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, permutations

from weft.ir.schedule import Event, Pipeline, Schedule
from weft.order.fold import fold
from weft.order.steps import project
from weft.order.timing import Spans, bound, span_of

Kind = tuple[str, str]
FINEST = 64  # parts of a period that times are rounded to
TRIES = 8_000
ORDERS = 24  # of blocks that live on several stages' devices


@dataclass(frozen=True)
class Pattern:
    """When each kind of event (phase, segment) of micro-batch 0 starts, and after how long the next one follows."""

    starts: Mapping[Kind, int]
    period: int
    length: int

    def unroll(self, pipeline: Pipeline) -> Schedule:
        """The schedule of all micro-batches."""
        ranks = {kind: number for number, kind in enumerate(self.starts)}
        keyed = [
            (start + micro * self.period, ranks[phase, name], micro, Event(phase, name, micro))
            for (phase, name), start in self.starts.items()
            for micro in range(pipeline.microbatches)
        ]
        keyed.sort(key=lambda entry: entry[:3])
        return project(pipeline, (entry[3] for entry in keyed))


def interlaced(pipeline: Pipeline, *, spans: Spans | None = None) -> Schedule:
    """Blocks that live on several stages' devices woven into the stages, without idle devices in the steady state."""
    return find_pattern(pipeline, spans).unroll(pipeline)


def find_pattern(pipeline: Pipeline, spans: Spans | None = None, *, divided: bool = False) -> Pattern:
    """The shortest pattern with the shortest period that is found within the tries."""
    task = make_task(fold(pipeline).pipeline, spans, divided=divided)
    period = task.least_period
    while True:
        found = place(task, period)
        if found is not None:
            return found
        period += max(1, period // 20)


@dataclass(frozen=True)
class Task:
    """What is to be placed: kinds of events along the data, with whole spans, needs, devices, and time to the end."""

    spans: Mapping[Kind, int]
    needs: Mapping[Kind, tuple[Kind, ...]]
    devices: Mapping[Kind, tuple[int, ...]]
    tails: Mapping[Kind, int]

    @property
    def least_period(self) -> int:
        """The work of the busiest device."""
        work: dict[int, int] = {}
        for kind, devices in self.devices.items():
            for device in devices:
                work[device] = work.get(device, 0) + self.spans[kind]
        return max(1, *work.values())


def kinds(pipeline: Pipeline, spans: Spans | None, *, divided: bool = False) -> dict[Kind, float]:
    """The kinds of events of one micro-batch along the data, and how long they take.

    `divided` puts off weight gradients wherever that can be.
    """
    split = {one.name for one in pipeline.segments if divided and one.trains and one.splits}
    found: list[Kind] = [("f", segment.name) for segment in pipeline.segments]
    found += [("b", one.name) for one in reversed(pipeline.segments) if one.trains]
    found += [("w", one.name) for one in reversed(pipeline.segments) if one.name in split]
    return {(phase, name): span_of(spans, name).of(phase, name not in split) for phase, name in found}


def make_task(pipeline: Pipeline, spans: Spans | None, *, divided: bool = False) -> Task:
    """The events of one micro-batch in whole times."""
    real = kinds(pipeline, spans, divided=divided)
    unit = _unit(list(real.values()), bound(pipeline, spans))
    # What takes no time takes a little here: events of a device then have one order.
    whole = {kind: max(round(span / unit), 1) for kind, span in real.items()}
    needs = {(phase, name): pipeline.needs(phase, name) for phase, name in real}
    tails: dict[Kind, int] = {}
    for kind in reversed(list(real)):
        after = (tails[one] for one in real if kind in needs[one])
        tails[kind] = whole[kind] + max(after, default=0)
    return Task(whole, needs, {kind: pipeline.by_name[kind[1]].devices for kind in real}, tails)


def place(task: Task, period: int, *, tries: int = TRIES) -> Pattern | None:
    """The shortest placement at a period that the tries find; None if there is none among them.

    Blocks that share only some devices with others come first, side by side in each order in turn: so they leave one
    gap, the same on all devices, that forwards and backwards fit in.
    """
    # The last try leaves those blocks free: exact where the tries suffice.
    orders = [*islice(_arrangements(task, period), ORDERS), {}]
    best: _Search | None = None
    for moments in orders:
        search = _Search(task, period, tries // len(orders), moments, length=best.length if best else 0)
        search.run()
        best = search if search.best is not None else best
    if best is None or best.best is None:
        return None
    return Pattern(_late(task, best.best, period), period, best.length)


def one_by_one(task: Task) -> Pattern:
    """One event at a time, and each micro-batch after the one before."""
    starts, now = dict[Kind, int](), 0
    for kind, span in task.spans.items():
        starts[kind] = now
        now += span
    return Pattern(starts, now, now)


def _arrangements(task: Task, period: int) -> Iterator[dict[Kind, int]]:
    """Moments of the blocks that overlap others in part: side by side, the first along the data at 0."""
    groups = {frozenset(devices) for devices in task.devices.values()}
    wide = [
        kind
        for kind, devices in task.devices.items()
        if any(group != frozenset(devices) and group & frozenset(devices) for group in groups)
        and any(len(group) < len(devices) for group in groups if group & frozenset(devices))
    ]
    if not wide or sum(task.spans[kind] for kind in wide) > period:
        return
    for order in permutations(wide[1:]):
        moments, now = {}, 0
        for kind in (wide[0], *order):
            moments[kind] = now
            now += task.spans[kind]
        yield moments


def _late(task: Task, starts: Mapping[Kind, int], period: int) -> dict[Kind, int]:
    """The same moments, each forward as many periods later as what follows it allows: less is live at once."""
    found = dict(starts)
    for kind in reversed(list(starts)):
        after = [found[one] for one in starts if kind in task.needs[one]]
        if kind[0] == "f" and after:
            found[kind] += (min(after) - found[kind] - task.spans[kind]) // period * period
    return found


@dataclass
class _Search:
    """Depth first along the data, earliest times first, cut off by the length of the best one found."""

    task: Task
    period: int
    tries: int
    moments: Mapping[Kind, int]
    best: dict[Kind, int] | None = None
    length: int = 0

    def __post_init__(self) -> None:
        self.kinds = list(self.task.spans)
        self.starts: dict[Kind, int] = {}
        self.taken: dict[int, int] = {device: 0 for places in self.task.devices.values() for device in places}
        for kind, start in self.moments.items():
            for device in self.task.devices[kind]:
                self.taken[device] |= self._mask(start, self.task.spans[kind])
        self.left: dict[int, list[int]] = {
            device: [
                self.task.spans[kind]
                for kind in self.kinds
                if device in self.task.devices[kind] and kind not in self.moments
            ]
            for device in self.taken
        }

    def run(self, number: int = 0) -> None:
        """Place the kinds from `number` on, and keep the best placement of all."""
        if number == len(self.kinds):
            self.best = dict(self.starts)
            self.length = max(start + self.task.spans[kind] for kind, start in self.starts.items())
            return
        kind = self.kinds[number]
        for start in self._candidates(kind):
            if self.tries <= 0:
                return
            self.tries -= 1
            if self.length and start + self.task.tails[kind] >= self.length:
                return
            if self._put(kind, start):
                self.run(number + 1)
            self._take(kind, start)

    def _candidates(self, kind: Kind) -> Iterator[int]:
        """Free times from the earliest on, one for each moment of the period."""
        first = max((self.starts[need] + self.task.spans[need] for need in self.task.needs[kind]), default=0)
        if kind in self.moments:
            yield first + (self.moments[kind] - first) % self.period
            return
        taken = 0
        for device in self.task.devices[kind]:
            taken |= self.taken[device]
        for start in range(first, first + self.period):
            if not taken & self._mask(start, self.task.spans[kind]):
                yield start

    def _mask(self, start: int, span: int) -> int:
        return _circle(start % self.period, span, self.period)

    def _put(self, kind: Kind, start: int) -> bool:
        """Take the place; False if what is left of a device does not fit into its gaps any more."""
        span = self.task.spans[kind]
        self.starts[kind] = start
        if kind in self.moments:
            return True
        fits = True
        for device in self.task.devices[kind]:
            self.taken[device] |= self._mask(start, span)
            self.left[device].remove(span)
            fits = fits and _fits(
                tuple(sorted(self.left[device], reverse=True)), _gaps(self.taken[device], self.period)
            )
        return fits

    def _take(self, kind: Kind, start: int) -> None:
        span = self.task.spans[kind]
        del self.starts[kind]
        if kind in self.moments:
            return
        for device in self.task.devices[kind]:
            self.taken[device] &= ~self._mask(start, span)
            self.left[device].append(span)


@lru_cache(maxsize=100_000)
def _circle(start: int, span: int, period: int) -> int:
    """The moments of an event as bits, around the period."""
    bits = ((1 << span) - 1) << start
    return (bits | bits >> period) & ((1 << period) - 1)


@lru_cache(maxsize=100_000)
def _gaps(taken: int, period: int) -> tuple[int, ...]:
    """Lengths of the free stretches around the period, longest first."""
    text = format(taken, f"0{period}b")
    if "1" not in text:
        return (period,)
    first = text.index("1")
    turned = text[first:] + text[:first]
    return tuple(sorted((len(gap) for gap in turned.split("1") if gap), reverse=True))


@lru_cache(maxsize=100_000)
def _fits(spans: tuple[int, ...], gaps: tuple[int, ...]) -> bool:
    """Whether spans (longest first) can be packed into gaps."""
    if not spans or not spans[0]:
        return True
    if sum(spans) > sum(gaps):
        return False
    span, rest = spans[0], spans[1:]
    for number, gap in enumerate(gaps):
        if gap >= span and (not number or gap != gaps[number - 1]):
            less = tuple(sorted((*gaps[:number], *gaps[number + 1 :], gap - span), reverse=True))
            if _fits(rest, less):
                return True
    return False


def _unit(spans: Sequence[float], work: float) -> float:
    """What whole times count: the common measure of whole spans, else a fraction of the period."""
    if all(float(span).is_integer() for span in spans):
        measure = (math.gcd(*(int(span) for span in spans)) or 1) / (1 if all(spans) else 8)
        if work / measure <= FINEST:
            return measure
    return work / FINEST or 1

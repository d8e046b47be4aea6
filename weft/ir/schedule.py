"""Schedules as data: segments on devices, events, and for each device the sequence of its events.

    Event    := phase ("f" | "b" | "w"), segment, micro-batch (a number, or m + k for every m in a relation)
    Relation := Before(Event, Event)
    Segment  := name, devices, names of the segments it reads, whether it trains, whether its backward may be divided
    Pipeline := segments (a reader stands after what it reads), number of micro-batches
    Schedule := device -> events in the order in which the device runs them

In: names, devices, numbers. Out: nouns, and the data dependencies between the events of a Pipeline. Promised: a
Pipeline's names are unique, its reads point backwards, each segment lives somewhere. Whether a Schedule fits a Pipeline
is `weft/order/check.py`'s to prove.

A segment on several devices is one event that they run together. A backward that is divided has a `b` (gradients of
what it reads) and a `w` (gradients of its weights); without a `w` the `b` does both. A segment that does not train has
only `f`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weft.errors import PlanError

PHASES = ("f", "b", "w")


@dataclass(frozen=True)
class Micro:
    """Any micro-batch: `m = Micro(); m + 2` is the second one after it."""

    offset: int = 0

    def __add__(self, other: int) -> Micro:
        return Micro(self.offset + other)

    def __sub__(self, other: int) -> Micro:
        return Micro(self.offset - other)

    def __str__(self) -> str:
        return f"m{self.offset:+d}" if self.offset else "m"


@dataclass(frozen=True)
class Event:
    """One phase of a segment (in a relation: of a block) for one micro-batch."""

    phase: str
    segment: str
    micro: int | Micro

    def __str__(self) -> str:
        return f"{self.phase}({self.segment}, {self.micro})"

    @property
    def number(self) -> int:
        """The micro-batch's number; an event of a schedule has one."""
        assert isinstance(self.micro, int), f"{self} has no number"
        return self.micro


@dataclass(frozen=True)
class Before:
    """`first` ends before `second` starts."""

    first: Event
    second: Event

    def __str__(self) -> str:
        return f"{self.first} before {self.second}"


Relation = Before


@dataclass(frozen=True)
class Segment:
    """A convex piece of the program on a set of devices.

    `reads` names the segments whose values it takes. `trains` is False for a piece without gradient. `splits` says
    that its weight gradients can be put off.
    """

    name: str
    devices: tuple[int, ...]
    reads: tuple[str, ...] = ()
    trains: bool = True
    splits: bool = False

    def has(self, phase: str) -> bool:
        """Whether it may have events of a phase."""
        return phase == "f" or (self.trains and (phase == "b" or self.splits))


@dataclass(frozen=True)
class Pipeline:
    """Segments, each after those it reads, and how many micro-batches run through them."""

    segments: tuple[Segment, ...]
    microbatches: int

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise PlanError(f"{self.microbatches} micro-batches are none", remedy="a step has at least one micro-batch")
        if not self.segments:
            raise PlanError("a pipeline without segments does nothing", remedy="give it at least one stage")
        seen: set[str] = set()
        for segment in self.segments:
            _verify_segment(segment, seen)
            seen.add(segment.name)

    @cached_property
    def by_name(self) -> Mapping[str, Segment]:
        """The segments by name."""
        return {segment.name: segment for segment in self.segments}

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """All devices, ascending."""
        return tuple(sorted({device for segment in self.segments for device in segment.devices}))

    @cached_property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """Who reads each segment, in pipeline order."""
        found: dict[str, list[str]] = {segment.name: [] for segment in self.segments}
        for segment in self.segments:
            for name in dict.fromkeys(segment.reads):
                found[name].append(segment.name)
        return {name: tuple(readers) for name, readers in found.items()}

    def without_gradient(self) -> Pipeline:
        """The same pipeline for inference: nothing trains."""
        return Pipeline(tuple(replace(segment, trains=False) for segment in self.segments), self.microbatches)

    def on(self, device: int) -> tuple[Segment, ...]:
        """The segments that live on a device, in pipeline order."""
        return tuple(segment for segment in self.segments if device in segment.devices)

    def needs(self, phase: str, name: str) -> tuple[tuple[str, str], ...]:
        """What must have run for the same micro-batch: (phase, segment) pairs.

        Forward waits for the segments read; backward for its own forward and for the backward of all readers that
        train; weight gradients for their backward.
        """
        if phase == "f":
            return tuple(("f", read) for read in dict.fromkeys(self.by_name[name].reads))
        if phase == "w":
            return (("b", name),)
        trained = (("b", reader) for reader in self.readers[name] if self.by_name[reader].trains)
        return (("f", name), *trained)

    def fault(self, event: Event) -> tuple[str, str] | None:
        """An event that the pipeline does not have, with the reason and what to do; None if it has it."""
        segment, count = self.by_name.get(event.segment), self.microbatches
        if segment is None:
            return f"{event}, and no segment is called {event.segment!r}", f"segments: {', '.join(self.by_name)}"
        if isinstance(event.micro, int) and not 0 <= event.micro < count:
            fact = f"there are {count} micro-batches (0 to {count - 1})"
            return f"{event}, and {fact}", "run more micro-batches, or leave the event out"
        if event.phase != "f" and not segment.trains:
            return f"{event}, and {segment.name!r} has no gradient", "such a segment has only its forward"
        if event.phase == "w" and not segment.splits:
            fact = f"the backward of {segment.name!r} cannot be divided"
            return f"{event}, and {fact}", "leave it out: the backward computes the weight gradients too"
        return None

    def before(self, event: Event) -> Iterator[Event]:
        """The events whose end an event waits for."""
        for phase, name in self.needs(event.phase, event.segment):
            yield Event(phase, name, event.micro)


@dataclass(frozen=True)
class Schedule:
    """For each device the sequence of its events; a segment on several devices has its events on each of them."""

    events: Mapping[int, tuple[Event, ...]]

    @cached_property
    def rows(self) -> tuple[tuple[Event, ...], ...]:
        """The sequences, those that devices have in common once (as far as they are one and the same tuple)."""
        return tuple({id(self.events[device]): self.events[device] for device in sorted(self.events)}.values())

    @cached_property
    def divided(self) -> frozenset[tuple[str, int | Micro]]:
        """The backwards whose weight gradients are put off: segment and micro-batch."""
        return frozenset((event.segment, event.micro) for event in self.every() if event.phase == "w")

    def every(self) -> tuple[Event, ...]:
        """Every event once."""
        return tuple(dict.fromkeys(event for events in self.rows for event in events))

    def __str__(self) -> str:
        """One line per device: `0: F0 F1 B0 ...`, with the segment's name where a device has several."""
        return "\n".join(f"{device}: {row(self.events[device])}" for device in sorted(self.events))


Rows = Mapping[int, str | Sequence[Event]]
"""For each device its events, or a row such as `F0 F1 B0` (`F0(a)` where it holds several stages)."""
ScheduleLike = str | Schedule | Rows | Callable[[Pipeline], Schedule | Rows]
"""A name of `weft.order.NAMES`, the events of every device by stage, or a function that makes them."""


def row(events: tuple[Event, ...]) -> str:
    """The events of one device as a compact row: `F0 F1 B0 F2 B1`, or `F0(a) F0(c)` where it runs several segments."""
    several = len({event.segment for event in events}) > 1
    return " ".join(
        f"{event.phase.upper()}{event.micro}" + (f"({event.segment})" if several else "") for event in events
    )


def _verify_segment(segment: Segment, seen: set[str]) -> None:
    if segment.name in seen:
        raise PlanError(f"two segments are called {segment.name!r}", remedy="give each segment a name of its own")
    if not segment.devices or len(set(segment.devices)) < len(segment.devices) or min(segment.devices) < 0:
        raise PlanError(
            f"segment {segment.name!r} lives on devices {list(segment.devices)}",
            remedy="name at least one device, each once, counted from 0",
        )
    for name in segment.reads:
        if name not in seen:
            raise PlanError(
                f"segment {segment.name!r} reads {name!r}, which does not stand before it",
                remedy="list segments so that each comes after those it reads",
            )

"""What happened in a simulated step, as the engine writes it down.

A Lane is the compute stream of one rank, from 0 on without a gap: interval i ends at `ends[i]` and begins where the one
before ends. Its code says what the stream does then, its ref why. Collectives (Flight) and messages (Message) know
what their start waited for last, so the chain that determines the step is found backwards (`critical.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from weft.simulate.trace import Event, Hold, Issue, Place, Post, Trace

COMPUTE, EXPOSED, BUBBLE, HOST, OCCUPIED = range(5)
"""Codes of intervals: a kernel runs (ref: its Run); waits for a collective or a message under way (the Flight or
Message); waits for a message that is not posted yet (the Message); waits for the host (the number of the event that it
comes to); a collective takes the core (the Flight)."""


@dataclass(slots=True)
class Lane:
    """What the compute stream of a rank does, in order; beside it when memory is taken and its collectives."""

    trace: Trace
    events: Sequence[Event]
    overlaps: bool
    launch: float
    ends: list[float] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    refs: list[object] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def add(self, end: float, code: int, ref: object) -> None:
        """The stream goes on until `end`."""
        self.ends.append(end)
        self.codes.append(code)
        self.refs.append(ref)

    @property
    def end(self) -> float:
        """Where the last interval ends."""
        return self.ends[-1] if self.ends else 0.0


@dataclass(frozen=True, slots=True)
class Spot:
    """A point of a rank's stream.

    Args:
        index: how many intervals of the lane are before it.
        event: the event of which the host was later than the stream; -1: the stream was later.
    """

    lane: Lane
    index: int
    event: int = -1


@dataclass(slots=True, eq=False)
class Flight:
    """A collective.

    Args:
        channel: it travels after the one before in the same channel. number: of it there.
        missing: members that have not issued it.
        ready: when the last of them did. origin: what its start waited for last.
        left: seconds of travel left at `since`, at `rate` to the second. version: of its expected end.
    """

    channel: int
    number: int
    issue: Issue
    missing: int
    ready: float = 0.0
    origin: Origin | None = None
    start: float = 0.0
    end: float = 0.0
    ended: bool = False
    left: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    version: int = 0

    @property
    def name(self) -> str:
        return self.issue.kind

    @property
    def place(self) -> Place:
        return self.issue.place


@dataclass(slots=True, eq=False)
class Message:
    """A message.

    Args:
        ready: when its data is computed. origin: what its start waited for last.
    """

    source: int
    post: Post
    posted: bool = False
    ready: float = 0.0
    start: float = 0.0
    end: float = 0.0
    origin: Origin | None = None

    @property
    def name(self) -> str:
        return "message"

    @property
    def place(self) -> Place:
        return self.post.place


Origin: TypeAlias = Spot | Flight | Message

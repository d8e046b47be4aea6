"""The critical path: the chain of kernels, collectives and messages, each begun by the end of the one before, that
determines how long the step takes.

In: the lanes of a step. Out: the pieces of the chain, from 0 to the end without a gap: their seconds sum to the step.
What was faster beside it could be slower without a change of the step; what is on the path could not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.simulate.history import COMPUTE, HOST, OCCUPIED, Flight, Lane, Message, Origin, Spot
from weft.simulate.trace import Issue, Place, Post, Run, Take

NOWHERE = Place("")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the critical path.

    Args:
        rank: whose; of a message, the sender. kind: "compute", "host", "message", or the kind of a collective.
        name: of what was run, as `mm`; else the kind.
    """

    rank: int
    kind: str
    name: str
    place: Place
    start: float
    end: float


def critical_path(lanes: Sequence[Lane]) -> tuple[Piece, ...]:
    """The chain that ends last."""
    lane = max(lanes, key=lambda one: one.end)
    return tuple(_backwards(Spot(lane, len(lane.ends))))[::-1]


def _backwards(at: Origin | None) -> Iterator[Piece]:
    rank = 0
    while at is not None:
        match at:
            case Spot(lane, index, event):
                rank = lane.trace.rank
                if event >= 0:
                    yield from _issuing(lane, event)
                    return
                at = None
                if index:
                    found = _piece(lane, index - 1)
                    if found is not None:
                        yield found
                    at = _before(lane, index - 1)
            case Flight():
                yield Piece(rank, at.name, at.name, at.place, at.start, at.end)
                at = at.origin
            case Message():
                yield Piece(at.source, at.name, at.name, at.place, at.start, at.end)
                at = at.origin


def _piece(lane: Lane, index: int) -> Piece | None:
    """What the stream itself did in an interval; None if it waited for something else."""
    code, ref, rank = lane.codes[index], lane.refs[index], lane.trace.rank
    start, end = lane.ends[index - 1] if index else 0.0, lane.ends[index]
    if code == COMPUTE and isinstance(ref, Run):
        return Piece(rank, "compute", ref.kernel.op, ref.place, start, end)
    if code == OCCUPIED and isinstance(ref, Flight):
        return Piece(rank, ref.name, ref.name, ref.place, start, end)
    if code == HOST and not lane.overlaps and isinstance(ref, int):
        return Piece(rank, "host", "host", place_of(lane, ref), start, end)
    return None


def _before(lane: Lane, index: int) -> Origin:
    """What the interval began, or ended, because of."""
    code, ref = lane.codes[index], lane.refs[index]
    if code == HOST and lane.overlaps and isinstance(ref, int):
        return Spot(lane, index, ref)
    if code not in (COMPUTE, OCCUPIED) and isinstance(ref, Flight | Message):
        return ref
    return Spot(lane, index)


def _issuing(lane: Lane, last: int) -> Iterator[Piece]:
    """A host that runs ahead never waits: all that it issued, up to an event."""
    end = lane.launch * sum(isinstance(one, Run | Issue | Post | Take) for one in lane.events[: last + 1])
    for index in range(last, -1, -1):
        if isinstance(lane.events[index], Run | Issue | Post | Take):
            yield Piece(lane.trace.rank, "host", "host", place_of(lane, index), end - lane.launch, end)
            end -= lane.launch


def place_of(lane: Lane, index: int) -> Place:
    """Where in the model an event is."""
    return getattr(lane.events[index], "place", NOWHERE)

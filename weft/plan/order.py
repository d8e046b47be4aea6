"""Relations between events, as data: what runs before what.

    Relation := Before(Event, Event)
    Event    := phase ("f" | "b" | "w"), block, micro-batch (a number, or m + k for every m)

The nouns are `weft/ir/schedule.py`'s. In: block names and micro-batch numbers. Out: Relations that `Plan.order`
records. Promised: an event does not stand before itself, and no relation contradicts the natural order (forward, then
backward, then weight gradients of one block and micro-batch).
"""

from __future__ import annotations

from weft.errors import PlanError
from weft.ir.schedule import PHASES, Before, Event, Micro, Relation

__all__ = ["Before", "Event", "Micro", "PHASES", "Relation", "b", "before", "f", "w"]


def f(block: str, micro: int | Micro) -> Event:
    """The forward of a block for one micro-batch."""
    return _event("f", block, micro)


def b(block: str, micro: int | Micro) -> Event:
    """The backward of a block for one micro-batch."""
    return _event("b", block, micro)


def w(block: str, micro: int | Micro) -> Event:
    """The weight gradients of a block for one micro-batch."""
    return _event("w", block, micro)


def _event(phase: str, block: str, micro: int | Micro) -> Event:
    if isinstance(micro, int) and micro < 0:
        raise PlanError(f"there is no micro-batch {micro}", remedy="count micro-batches from 0")
    return Event(phase, block, micro)


def before(first: Event, second: Event) -> Before:
    """The first event ends before the second starts.

    rewrite: events in any order that data allows  ->  those orders in which `first` precedes `second`
    """
    if not all(isinstance(one, Event) for one in (first, second)):
        raise PlanError(
            f"before({first!r}, {second!r}) does not relate two events", remedy="write before(f(a, m), b(a, m))"
        )
    if isinstance(first.micro, int) != isinstance(second.micro, int):
        raise PlanError(
            f"{first} and {second} mix a numbered micro-batch with any micro-batch",
            remedy="number both, or write both with m",
        )
    same = first.segment == second.segment and first.micro == second.micro
    if same and PHASES.index(first.phase) >= PHASES.index(second.phase):
        raise PlanError(
            f"{first} cannot run before {second}", remedy="forward, backward and weight gradients follow each other"
        )
    return Before(first, second)

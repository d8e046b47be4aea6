"""The joint order of a Schedule: one graph of all devices' sequences and the data between events.

In: a Pipeline and a Schedule of its events. Out: an order of all events that every device and all data agree with, or
the shortest cycle that forbids one. Promised: an event shared by several devices is one node, so an order exists if and
only if the devices can run the schedule: asynchronous sends never block, and shared events meet in one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from weft.ir.schedule import Event, Pipeline, Schedule

Edges = Mapping[Event, tuple[Event, ...]]


@dataclass(frozen=True)
class Joint:
    """All events, and by their numbers what each waits for: its data, and the event before it on its devices."""

    events: tuple[Event, ...]
    waits: tuple[tuple[int, ...], ...]

    def order(self) -> list[int]:
        """The numbers of all events in an order that keeps every edge; fewer if some wait in a circle."""
        follow: list[list[int]] = [[] for _ in self.events]
        left = [len(found) for found in self.waits]
        for number, found in enumerate(self.waits):
            for one in found:
                follow[one].append(number)
        done = [number for number, count in enumerate(left) if not count]
        for number in done:
            for after in follow[number]:
                left[after] -= 1
                if not left[after]:
                    done.append(after)
        return done

    def cycle(self) -> tuple[Event, ...]:
        """Events of which each waits for the next and the last for the first, as few as lead back to one of them."""
        done = set(self.order())
        stuck = {
            number: [one for one in found if one not in done]
            for number, found in enumerate(self.waits)
            if number not in done
        }
        if not stuck:
            return ()
        # Every stuck event waits for a stuck one: walking backwards must come around.
        number, seen = next(iter(stuck)), set[int]()
        while number not in seen:
            seen.add(number)
            number = stuck[number][0]
        return tuple(self.events[one] for one in _way_round(number, stuck))


def joint(pipeline: Pipeline, schedule: Schedule) -> Joint:
    """One graph of the data and of all devices' sequences."""
    events = schedule.every()
    numbers = {event: number for number, event in enumerate(events)}
    waits: list[dict[int, None]] = [
        {numbers[need]: None for need in pipeline.before(event) if need in numbers} for event in events
    ]
    for row in schedule.rows:
        for first, second in pairwise([numbers[event] for event in row]):
            waits[second][first] = None
    return Joint(events, tuple(tuple(found) for found in waits))


def of_edges(waits: Edges) -> Joint:
    """A graph given by what each event waits for."""
    numbers = {event: number for number, event in enumerate(waits)}
    return Joint(tuple(waits), tuple(tuple(numbers[one] for one in found) for found in waits.values()))


def _way_round(start: int, waits: Mapping[int, Iterable[int]]) -> list[int]:
    """The shortest way from an event back to itself, breadth first."""
    came: dict[int, int] = {}
    queue = deque([start])
    while queue:
        number = queue.popleft()
        for one in waits[number]:
            if one == start:
                path = [number]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return path[::-1]
            if one not in came:
                came[one] = number
                queue.append(one)
    raise AssertionError("an event of a cycle leads back to itself")

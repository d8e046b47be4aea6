"""Steps that never end: who waits for whom, in words.

In: what belongs together, and how far each rank came. Out: nothing if all came to their ends, else a WeftError. What
can never come is told before what only waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.errors import WeftError
from weft.simulate.history import Flight, Lane
from weft.simulate.matching import Matches, where
from weft.simulate.trace import Issue, Place, Take, Wait

TOLD = 4
"""Ranks of which a message tells what they wait for."""


def refuse_stuck(matches: Matches, lanes: list[Lane], reached: list[int]) -> None:
    """Refuse a step that never ends.

    Args:
        reached: by class, the number of the event that could not be played.
    """
    found = list(_waits(matches, lanes, reached))
    if not found:
        return
    found.sort(key=lambda one: not one[0])
    told = "; ".join(text for _, text, _ in found[:TOLD])
    more = f"; and {len(found) - TOLD} more" if len(found) > TOLD else ""
    raise WeftError(
        f"the step never ends: {told}{more}",
        place=where(found[0][2]),
        remedy="give every message a rank that posts it, and every collective all of its members, in one order",
    )


def _waits(matches: Matches, lanes: list[Lane], reached: list[int]) -> Iterator[tuple[bool, str, Place]]:
    """Whether it can never come, what a rank waits for, and where."""
    named = set()
    for number, lane in enumerate(lanes):
        event = lane.events[reached[number]] if reached[number] < len(lane.events) else None
        if isinstance(event, Take):
            never = matches.taken[number][reached[number]] is None
            end = "which it never posts" if never else "which it has not come to"
            yield never, f"rank {lane.trace.rank} takes {event.tag!r} from rank {event.peer}, {end}", event.place
        elif isinstance(event, Wait):
            # numbers of calls may be used again: the last one counts
            index = max(i for i, one in enumerate(lane.events[: reached[number]]) if _issues(one, event.call))
            flight = matches.issued[number][index][0]
            named.add(id(flight))
            never, text = _missing(matches, lanes, reached, flight)
            yield never, f"rank {lane.trace.rank} waits for {text}", flight.place
    for channel in matches.channels:
        for flight in channel.flights:
            if not flight.ended and flight.missing and id(flight) not in named:
                never, text = _missing(matches, lanes, reached, flight)
                if never:
                    rank = lanes[channel.users[0]].trace.rank
                    yield never, f"rank {rank} issues {text}", flight.place


def _issues(event: object, call: int) -> bool:
    return isinstance(event, Issue) and event.call == call


def _missing(matches: Matches, lanes: list[Lane], reached: list[int], flight: Flight) -> tuple[bool, str]:
    """Which members did not issue the first collective of the channel that has not ended; whether one never does."""
    channel = matches.channels[flight.channel]
    first = next(one for one in channel.flights if not one.ended)
    never, later = [], []
    for number, _ in channel.members:
        mine = [index for index, flights in matches.issued[number].items() if first in flights]
        if not mine:
            never.append(lanes[number].trace.rank)
        elif mine[0] >= reached[number]:
            later.append(lanes[number].trace.rank)
    ranks = channel.ranks if len(channel.ranks) <= 8 else (*channel.ranks[:8], "...")
    group = ", ".join(map(str, ranks))
    text = f"{first.name} number {first.number} of ranks {group}"
    if never:
        return True, f"{text}, which rank {never[0]} never issues"
    return False, f"{text}, which rank {later[0]} has not come to" if later else text

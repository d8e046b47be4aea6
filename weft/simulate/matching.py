"""Which events of the ranks that are played belong together.

In: a Job. Out: Matches: for every Issue the collectives in which it counts, for every Post and Take the message. All of
it is known before time runs.

One rank of each class of alike ranks is played. A member of a group that is not played does what the one of its class
does with a group of its own, with members of the same classes: the group itself where the played rank is a member, else
the groups of these classes are paired by the order of their first use. The n-th collective of one is the n-th of the
other. Peers of messages are found in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.errors import WeftError
from weft.simulate.history import Flight, Message
from weft.simulate.trace import Issue, Job, Place, Post, Take, Trace

Members = tuple[tuple[int, int], ...]
"""Of a channel: (class, group) of each class in it; group -1: its ranks have no such group."""


@dataclass(frozen=True)
class Channel:
    """Collectives that travel one after the other.

    Args:
        members: whose Issues they wait for. users: the classes whose own collectives they are. ranks: of the group.
    """

    members: Members
    users: tuple[int, ...]
    ranks: tuple[int, ...]
    flights: tuple[Flight, ...]


@dataclass(frozen=True)
class Matches:
    """What belongs together.

    Args:
        issued: by class and number of the event, the collectives that an Issue counts for; the rank's own is the first.
        posted, taken: by class and number of the event; None: nobody posts it.
    """

    channels: Sequence[Channel]
    issued: Sequence[Mapping[int, tuple[Flight, ...]]]
    posted: Sequence[Mapping[int, Message]]
    taken: Sequence[Mapping[int, Message | None]]


def match(job: Job) -> Matches:
    """What belongs together."""
    classes = classes_of(job)
    groups = _Groups(job, classes)
    channels = _channels(groups)
    return Matches(channels, _issued(groups, channels), *_messages(job, classes))


def classes_of(job: Job) -> list[int]:
    """The class of every rank."""
    found = [-1] * job.devices
    for number, trace in enumerate(job.traces):
        for rank in trace.alike:
            found[rank] = number
    assert -1 not in found, f"rank {found.index(-1)} is alike to none that is played"
    return found


class _Groups:
    """The groups of every class, in the order of their first use, with the numbers of their Issues."""

    def __init__(self, job: Job, classes: Sequence[int]) -> None:
        self.classes = classes
        self.ranks: list[tuple[int, ...]] = []
        self.kinds: list[tuple[tuple[int, int], ...]] = []
        """Of every group: how many ranks of which class."""
        self.uses: list[dict[int, dict[int, Issue]]] = []
        """By class and group the Issues, by number of the event."""
        numbers: dict[tuple[int, ...], int] = {}
        # a group may be large, and hashing it costs as much: the same tuple is looked up once
        same: dict[int, tuple[int, tuple[int, ...]]] = {}
        for trace in job.traces:
            uses: dict[int, dict[int, Issue]] = {}
            for index, event in enumerate(trace.events):
                if type(event) is Issue:
                    known = same.get(id(event.group))
                    if known is None:
                        assert trace.rank in event.group, f"rank {trace.rank} is no member of {event.group}"
                        known = same[id(event.group)] = (self._number(event.group, numbers), event.group)
                    uses.setdefault(known[0], {})[index] = event
            self.uses.append(uses)

    def _number(self, group: tuple[int, ...], numbers: dict[tuple[int, ...], int]) -> int:
        if group not in numbers:
            numbers[group] = len(numbers)
            self.ranks.append(group)
            self.kinds.append(tuple(sorted(Counter(self.classes[rank] for rank in group).items())))
        return numbers[group]

    def _partner(self, mine: int, group: int, other: int) -> int:
        """The group of another class that is to it what `group` is to the class `mine`; -1 if it has none."""
        if mine == other or group in self.uses[other]:
            return group
        kind = self.kinds[group]
        place = [one for one in self.uses[mine] if self.kinds[one] == kind and one not in self.uses[other]].index(group)
        alike = [one for one in self.uses[other] if self.kinds[one] == kind]
        alike = [one for one in alike if one not in self.uses[mine]] or alike
        return alike[min(place, len(alike) - 1)] if alike else -1

    def members(self, mine: int, group: int) -> Members:
        """Whose Issues the collectives of a group of the class `mine` wait for."""
        return tuple((other, self._partner(mine, group, other)) for other, _ in self.kinds[group])


def _channels(groups: _Groups) -> list[Channel]:
    """Classes that wait for the same Issues have one channel."""
    users: dict[Members, list[tuple[int, int]]] = {}
    for mine, uses in enumerate(groups.uses):
        for group in uses:
            users.setdefault(groups.members(mine, group), []).append((mine, group))
    found = []
    for number, (members, whose) in enumerate(users.items()):
        rows = [list(groups.uses[mine][group].values()) for mine, group in whose]
        longest = max(rows, key=len)
        flights = tuple(Flight(number, count, issue, len(members)) for count, issue in enumerate(longest))
        for row in rows:
            for flight, issue in zip(flights, row, strict=False):
                _join(flight, issue)
        found.append(Channel(members, tuple(mine for mine, _ in whose), groups.ranks[whose[0][1]], flights))
    return found


def _join(flight: Flight, issue: Issue) -> None:
    """Members may have parts of different sizes: the largest one counts."""
    if issue.kind != flight.issue.kind:
        raise WeftError(
            f"members of one group issue {flight.issue.kind} and {issue.kind} where they are to meet",
            place=f"{where(flight.issue.place)} and {where(issue.place)}",
            remedy="all members issue the collectives of a group in the same order",
        )
    if issue.bytes > flight.issue.bytes:
        flight.issue = issue


def where(place: Place) -> str:
    """A place in words: `forward f0, net.py:16`."""
    return ", ".join(filter(None, (f"{place.phase} {place.what}".strip(), place.line)))


def _issued(groups: _Groups, channels: Sequence[Channel]) -> list[dict[int, tuple[Flight, ...]]]:
    found: list[dict[int, tuple[Flight, ...]]] = [{} for _ in groups.uses]
    for mine, uses in enumerate(groups.uses):
        for group, indexes in uses.items():
            own = groups.members(mine, group)
            heard = [one for one in channels if (mine, group) in one.members]
            heard.sort(key=lambda one: one.members != own)
            for number, index in enumerate(indexes):
                found[mine][index] = tuple(one.flights[number] for one in heard if number < len(one.flights))
    return found


Posts = dict[str, dict[int, list[Message]]]
"""By tag and peer, in order."""


def _messages(job: Job, classes: Sequence[int]) -> tuple[list[dict[int, Message]], list[dict[int, Message | None]]]:
    posted: list[dict[int, Message]] = []
    boxes: list[Posts] = []
    for trace in job.traces:
        box: Posts = {}
        mine = {index: Message(trace.rank, one) for index, one in enumerate(trace.events) if type(one) is Post}
        for message in mine.values():
            box.setdefault(message.post.tag, {}).setdefault(message.post.peer, []).append(message)
        posted.append(mine)
        boxes.append(box)
    return posted, [_taken(trace, job, classes, boxes) for trace in job.traces]


def _taken(trace: Trace, job: Job, classes: Sequence[int], boxes: Sequence[Posts]) -> dict[int, Message | None]:
    found: dict[int, Message | None] = {}
    peers: dict[tuple[str, int], dict[int, int]] = {}
    """By tag and class the peers, in the order of their first message, with the number of messages so far."""
    for index, event in enumerate(trace.events):
        if type(event) is not Take:
            continue
        source = classes[event.peer]
        known = peers.setdefault((event.tag, source), {})
        number = known.get(event.peer, 0)
        known[event.peer] = number + 1
        box = boxes[source].get(event.tag, {})
        to = [target for target in box if classes[target] == classes[trace.rank]]
        if event.peer == job.traces[source].rank and trace.rank in box:
            row = box[trace.rank]
        else:
            row = box[to[min(list(known).index(event.peer), len(to) - 1)]] if to else []
        found[index] = row[number] if number < len(row) else None
    return found

"""The simulator: the traces of a job, played on a machine.

In: a Job, a Machine. Out: a Simulation. Promised: the same for the same input; what is issued happens in the order of
the traces; a step that never ends is refused with who waits for what.

Each rank that is played has

    a host             goes through the events. On devices that overlap, it takes `launch` for each kernel, collective
                       and message that it issues, and runs ahead of the stream without limit.
    a compute stream   runs kernels in order; a Wait, and a Take, make it wait, not the host.
    streams of groups  carry the collectives of each group in order, while compute goes on. A collective starts when all
                       members have issued it and have come to that point of their compute streams.

Where the device does not overlap (`cpu`), the host is the compute stream: each kernel takes `overhead` more, and a
collective that is under way takes its time from the core of each member (`Machine.occupies`), unless that waits.
Issuing does not wait for other members.

Messages from one rank to another travel one after the other. Collectives of one rank that use one link
(`Machine.link`) at the same time have equal shares of it, and each goes as fast as its slowest member.

A rank runs ahead in time until it needs what others do; only starts and ends of collectives are played in the order of
time, so that the work is proportional to the number of events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Any

from weft.simulate.history import BUBBLE, COMPUTE, EXPOSED, HOST, OCCUPIED, Flight, Lane, Message, Spot
from weft.simulate.machine import Machine, Scaled
from weft.simulate.matching import match
from weft.simulate.result import Simulation, summed_up
from weft.simulate.stuck import refuse_stuck
from weft.simulate.trace import Hold, Issue, Job, Post, Run, Take, Trace, Wait

RANKS, ENDS, STARTS = range(3)
"""At one time ranks go on first, then collectives end, then others start: the order of ranks changes nothing."""


def simulate(job: Job, machine: Machine) -> Simulation:
    """Play a step."""
    engine = _Engine(job, machine)
    engine.play()
    return summed_up(job, [player.lane for player in engine.players], machine.device)


def what_if(job: Job, machine: Machine, change: Mapping[str, float]) -> Simulation:
    """Play a step on a changed machine: arguments of Scaled, such as those of `CHANGES`."""
    return simulate(job, Scaled(machine, **change))


class _Player:
    """A rank while it is played."""

    __slots__ = (
        *("blocked", "calls", "events", "finished", "host", "index", "lane", "missed"),
        *("next", "now", "occupied", "overheads", "owed", "rank", "reached", "times"),
    )

    def __init__(self, trace: Trace, index: int, machine: Machine) -> None:
        device = machine.device(trace.rank)
        self.rank, self.index, self.events = trace.rank, index, list(trace.events)
        self.lane = Lane(trace, self.events, device.overlaps, device.launch if device.overlaps else 0.0)
        self.occupied = not device.overlaps and machine.occupies(trace.rank)
        self.now, self.host, self.next = 0.0, 0.0, 0
        self.blocked = self.finished = False
        self.reached = False
        """Of an occupied rank: whether all that others do before its next event has been played."""
        self.owed: list[tuple[float, Flight]] = []
        """Time of the core that collectives took and `now` does not count yet."""
        self.missed: list[Flight] = []
        """Collectives that began while the rank was blocked."""
        self.calls: dict[int, Flight] = {}
        self.times: dict[str, float] = {}
        self.overheads: dict[str, float] = {}

    def until(self, end: float, code: int, ref: object) -> None:
        """The stream waits."""
        if end > self.now:
            self.lane.add(end, code, ref)
            self.now = end

    def spot(self) -> Spot:
        """Where the rank is: when what it issues now may start, and why then."""
        return Spot(self.lane, len(self.lane.ends), self.next if self.host > self.now else -1)


class _Engine:
    """All ranks that are played, and what is going to happen."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self.machine = machine
        self.matches = match(job)
        self.players = [_Player(trace, index, machine) for index, trace in enumerate(job.traces)]
        self.users = [[self.players[one] for one in channel.users] for channel in self.matches.channels]
        self.links = [machine.link(channel.ranks) for channel in self.matches.channels]
        self.loads: dict[tuple[int, str], dict[tuple[int, int], Flight]] = {}
        """By rank and link, what is under way."""
        self.costs: dict[tuple[int, str, int], float] = {}
        self.sent: dict[tuple[int, int], Message] = {}
        """By source and target, the last message."""
        self.waiters: dict[int, list[_Player]] = {}
        """Who is blocked, by the `id` of the Message or Flight."""
        self.ready: list[_Player] = list(self.players)
        self.heap: list[tuple[float, int, int, Callable[[Any], None], object]] = []
        self.count = 0
        self.clock = 0.0
        self.does: dict[type, Callable[..., bool]] = {
            Issue: self._issue,
            Wait: self._wait,
            Post: self._post,
            Take: self._take,
        }

    def play(self) -> None:
        """Play to the end."""
        heap = self.heap
        while True:
            while self.ready:
                self._advance(self.ready.pop())
            if not heap:
                break
            self.clock, _, _, action, what = heappop(heap)
            action(what)
        refuse_stuck(self.matches, [player.lane for player in self.players], [player.next for player in self.players])
        for player in self.players:
            assert player.finished, f"rank {player.rank} stopped at event {player.next}"
            flights = player.lane.flights
            if flights:
                last = max(flights, key=lambda one: one.end)
                player.until(last.end, EXPOSED, last)

    def _at(self, time: float, turn: int, action: Callable[[Any], None], what: object) -> None:
        self.count += 1
        heappush(self.heap, (time, turn, self.count, action, what))

    # ranks

    def _advance(self, player: _Player) -> None:
        """Go on until the rank needs what is not there."""
        events, lane, does = player.events, player.lane, self.does
        count, launch, overlaps, holds = len(events), lane.launch, lane.overlaps, lane.holds
        times, seconds = player.times, self.machine.seconds
        while player.next < count:
            event = events[player.next]
            if type(event) is Run:
                key = event.kernel.key
                took = times.get(key)
                if took is None:
                    took = times[key] = seconds(player.rank, event.kernel)
                if overlaps:
                    player.host += launch
                    late = player.host
                else:
                    late = player.now + self._overhead(player, event.place.phase)
                if late > player.now:
                    lane.add(late, HOST, player.next)
                    player.now = late
                player.now += took
                lane.add(player.now, COMPUTE, event)
            elif type(event) is Hold:
                lane.times.append(player.now)
                holds.append(event)
            else:
                if player.occupied and not player.reached:
                    self._at(player.now, RANKS, self._reach, player)
                    return
                if not does[type(event)](player, event):
                    player.blocked = True
                    return
                player.reached = False
            player.next += 1
        if player.occupied and not player.reached:
            self._at(player.now, RANKS, self._reach, player)
            return
        player.until(player.host, HOST, count - 1)
        player.finished = True

    def _overhead(self, player: _Player, phase: str) -> float:
        found = player.overheads.get(phase)
        if found is None:
            found = player.overheads[phase] = self.machine.overhead(phase)
        return found

    def _reach(self, player: _Player) -> None:
        """An occupied rank comes to its next event, if no collective took time from it."""
        if player.owed:
            for took, flight in player.owed:
                player.until(player.now + took, OCCUPIED, flight)
            player.owed.clear()
            self._at(player.now, RANKS, self._reach, player)
        else:
            player.reached = True
            self.ready.append(player)

    def _wake(self, player: _Player) -> None:
        """What a rank was blocked for is there. Collectives that began meanwhile still need its core."""
        player.blocked = False
        for flight in player.missed:
            if not flight.ended:
                player.owed.append((flight.left - (self.clock - flight.since) * flight.rate, flight))
        player.missed.clear()
        self.ready.append(player)

    # events that concern others: whether the rank may go on

    def _issue(self, player: _Player, event: Issue) -> bool:
        flights = self.matches.issued[player.index][player.next]
        player.host += player.lane.launch
        ready, spot = max(player.host, player.now), player.spot()
        player.calls[event.call] = flights[0]
        player.lane.flights.append(flights[0])
        for flight in flights:
            if flight.origin is None or ready > flight.ready:
                flight.ready, flight.origin = ready, spot
            flight.missing -= 1
            if not flight.missing:
                self._plan(flight)
        return True

    def _wait(self, player: _Player, event: Wait) -> bool:
        flight = player.calls.get(event.call)
        assert flight is not None, f"rank {player.rank} waits for call {event.call}, which it did not issue"
        if not flight.ended:
            self.waiters.setdefault(id(flight), []).append(player)
            return False
        player.until(flight.end, EXPOSED, flight)
        return True

    def _post(self, player: _Player, event: Post) -> bool:
        message = self.matches.posted[player.index][player.next]
        player.host += player.lane.launch
        player.lane.messages.append(message)
        pair = (player.rank, event.peer)
        before = self.sent.get(pair)
        self.sent[pair] = message
        message.posted = True
        message.ready = message.start = max(player.host, player.now)
        message.origin = player.spot()
        if before is not None and before.end > message.ready:
            message.start, message.origin = before.end, before
        message.end = message.start + self.machine.message(*pair, event.bytes)
        for taker in self.waiters.pop(id(message), ()):
            self._wake(taker)
        return True

    def _take(self, player: _Player, event: Take) -> bool:
        message = self.matches.taken[player.index][player.next]
        if message is None:
            return False
        if not message.posted:
            self.waiters.setdefault(id(message), []).append(player)
            return False
        if player.occupied and message.end > self.clock:
            # until then collectives may begin, which take no time from a rank that waits
            self._at(message.end, RANKS, self._wake, player)
            return False
        player.host += player.lane.launch
        player.until(min(message.ready, message.end), BUBBLE, message)
        player.until(message.end, EXPOSED, message)
        return True

    # collectives

    def _plan(self, flight: Flight) -> None:
        """All members have issued it: it starts when they are there and the one before has ended."""
        if flight.number:
            before = self.matches.channels[flight.channel].flights[flight.number - 1]
            if not before.ended:
                return
            if before.end > flight.ready:
                flight.ready, flight.origin = before.end, before
        self._at(flight.ready, STARTS, self._start, flight)

    def _start(self, flight: Flight) -> None:
        now, channel, users = self.clock, flight.channel, self.users[flight.channel]
        key = (channel, flight.issue.kind, flight.issue.bytes)
        cost = self.costs.get(key)
        if cost is None:
            ranks = self.matches.channels[channel].ranks
            cost = self.costs[key] = self.machine.collective(flight.issue.kind, ranks, flight.issue.bytes)
        flight.start = flight.since = now
        flight.left = cost
        for player in users:
            if player.occupied and player.blocked:
                player.missed.append(flight)
            elif player.occupied and not player.finished:
                player.owed.append((cost, flight))
        link = self.links[channel]
        if link is None:
            flight.rate = 1.0
            self._at(now + cost, ENDS, self._end, (flight, 0))
            return
        for player in users:
            self.loads.setdefault((player.rank, link), {})[channel, flight.number] = flight
        self._share(users, link)

    def _share(self, users: list[_Player], link: str) -> None:
        """The collectives on a link of some ranks have become more, or fewer: when each ends now."""
        touched = {key: one for player in users for key, one in self.loads[player.rank, link].items()}
        for flight in touched.values():
            rate = 1 / max(len(self.loads[player.rank, link]) for player in self.users[flight.channel])
            if rate != flight.rate:
                flight.left = max(0.0, flight.left - (self.clock - flight.since) * flight.rate)
                flight.since, flight.rate = self.clock, rate
                flight.version += 1
                self._at(self.clock + flight.left / rate, ENDS, self._end, (flight, flight.version))

    def _end(self, expected: tuple[Flight, int]) -> None:
        flight, version = expected
        if version != flight.version:
            return
        flight.end, flight.ended = self.clock, True
        channel, link = flight.channel, self.links[flight.channel]
        if link is not None:
            for player in self.users[channel]:
                del self.loads[player.rank, link][channel, flight.number]
            self._share(self.users[channel], link)
        for waiter in self.waiters.pop(id(flight), ()):
            self._wake(waiter)
        flights = self.matches.channels[channel].flights
        if flight.number + 1 < len(flights) and not flights[flight.number + 1].missing:
            self._plan(flights[flight.number + 1])

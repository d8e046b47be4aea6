"""The cheapest way from one layout to another.

In: two Layouts of a tensor, the size of an element, what links cost. Out: the moves of a shortest path, none if every
device holds its target parts already. Dijkstra's search runs over layouts:

    where both layouts fit one grid (`refine`)     grid moves (`moves`) from the source toward the target
    everywhere                                     an exchange, point to point, straight to the target
    where no grid fits both                        sums on the source's own grid before the exchange; copies on the
                                                   target's own grid completed by an all_gather after it

Promised: any layout reaches any layout; the last move's target holds the same parts, slot by slot, as the target
asked for; equal inputs give equal paths.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from weft.cost.links import Links
from weft.cost.moves import GridMoves, Priced, carried, largest_part
from weft.cost.refine import coalesce, common, same_parts
from weft.ir.layout import COPY, Layout, even, split
from weft.ir.program import Move
from weft.ir.routes import Route, Routing

__all__ = ["Load", "Resharder", "Search", "measure", "same_parts"]

MOST_DEVICES = 64
"""The cost of a straight move among more devices is estimated from a sample of them."""

SAMPLE = 16
"""Devices in such a sample."""


class Resharder:
    """Cheapest paths under one table of links, each searched once."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._find = cache(self._searched)

    def path(self, source: Layout, target: Layout, itemsize: int) -> tuple[Move, ...]:
        """The moves of the cheapest path."""
        return self._find(source, target, itemsize)[0]

    def seconds(self, source: Layout, target: Layout, itemsize: int) -> float:
        """What the cheapest path costs."""
        return self._find(source, target, itemsize)[1]

    def _searched(self, source: Layout, target: Layout, itemsize: int) -> tuple[tuple[Move, ...], float]:
        assert source.shape == target.shape, f"{source} and {target} are of different tensors"
        return ((), 0.0) if same_parts(source, target) else Search(source, target, itemsize, self.links).run()


class Search:
    """One shortest path."""

    def __init__(self, source: Layout, target: Layout, itemsize: int, links: Links) -> None:
        self.target, self.itemsize, self.links = target, itemsize, links
        first, last = coalesce(source), coalesce(target)
        pair = common(first, last)
        self._first, self._last = pair or (first, last)
        self._moves = GridMoves(self._last, itemsize, links) if pair else None
        # Where a layout's rewritten form holds the same parts, the search starts, or ends, there.
        self._start = self._first if same_parts(source, self._first) else source
        self._goal = self._last if same_parts(target, self._last) else target
        self._landings = {} if pair or last.grid.repeats else dict(_landings(last, self))

    def run(self) -> tuple[tuple[Move, ...], float]:
        """The moves, and what they cost. Straight moves enter the heap at the least they can cost, and are
        measured only when nothing cheaper is left."""
        numbers = itertools.count()
        heap: list[_Entry] = [(0.0, 0, next(numbers), self._start, (), None)]
        done: set[Layout] = set()
        while heap:
            cost, length, _, now, path, straight = heapq.heappop(heap)
            if straight is not None:
                there, so_far = straight
                move, seconds = self.direct(now, there)
                heapq.heappush(heap, (so_far + seconds, length, next(numbers), there, (*path, move), None))
                continue
            if now in done:
                continue
            done.add(now)
            if now == self._goal:
                return path, cost
            for move, seconds in self._after(now):
                if move.target not in done:
                    heapq.heappush(heap, (cost + seconds, length + 1, next(numbers), move.target, (*path, move), None))
            for there in self._straight(now):
                least = cost + self._least(now, there)
                heapq.heappush(heap, (least, length + 1, next(numbers), now, path, (there, cost)))
        raise AssertionError(f"no path from {self._start} to {self.target}")

    def _after(self, now: Layout) -> Iterator[Priced]:
        """Moves whose cost follows from the grid."""
        if self._moves and now.grid == self._last.grid:
            yield from self._moves.after(now)
        elif now in self._landings:
            yield self._landings[now]
        elif not self._moves and now.is_partial and now.grid == self._first.grid and not now.grid.repeats:
            yield from _completed(now, self)

    def _straight(self, now: Layout) -> Iterator[Layout]:
        """Where one move may lead straight from here."""
        if now == self._start != self._first:
            yield self._first
        if now in self._landings:
            return
        yield from self._landings
        if now != self._last:
            yield self._last
        if self._goal != self._last and now in (self._start, self._last):
            yield self._goal

    def direct(self, source: Layout, target: Layout) -> Priced:
        """One move straight from layout to layout: local if nothing leaves a device, else the cheaper carrier."""
        routing = Routing(source, target)
        load = measure(routing, self.itemsize)
        if not load.moved:
            return Move("local", source, target), self.links.seconds("local", 1, load.copied)
        copying = self.links.seconds("local", 1, load.copied)
        kinds = [("exchange", self.links.seconds("exchange", load.peers + 1, load.moved))]
        if source.grid == target.grid and not source.grid.repeats:
            # A collective's group is closed: a device also waits for those that only its peers talk to.
            size = load.peers + 1 if load.sampled else len(routing.group(source.grid.devices[0]))
            if size > 1:
                kinds.append(("all_to_all", self.links.seconds("all_to_all", size, load.moved * size / (size - 1))))
        kind, seconds = min(kinds, key=lambda found: found[1])
        return Move(kind, source, target), seconds + copying

    def _least(self, source: Layout, target: Layout) -> float:
        """No straight move costs less: the fullest target part receives what its device cannot hold already."""
        if target.is_partial:
            return 0.0
        needed = largest_part(target) * math.prod(source.grid.axes[axis].size for axis in source.partial_axes)
        held = largest_part(source) * max(map(len, source.grid.cells_on.values()))
        received = max(0, needed - held) * self.itemsize
        if not received:
            return 0.0
        size = 1 + math.ceil(received / (held * self.itemsize)) if held else 2
        carried = min(
            self.links.seconds("exchange", size, received),
            self.links.seconds("all_to_all", size, received * size / (size - 1)),
        )
        return carried + self.links.seconds("local", 1, needed * self.itemsize)


_Entry = tuple[float, int, int, Layout, tuple[Move, ...], tuple[Layout, float] | None]
"""Cost, number of moves, number of the entry, layout reached, moves so far; and for a straight move not yet measured
where it leads and what the moves so far cost."""


@dataclass(frozen=True)
class Load:
    """What the busiest device does in an exchange: bytes to or from others, bytes copied or added, peers."""

    moved: float
    copied: float
    peers: int
    sampled: bool = False


def measure(routing: Routing, itemsize: int) -> Load:
    """The load of a change of layout; of a large one, an estimate from some of its devices."""
    devices = {*routing.source.grid.cells_on, *routing.target.grid.cells_on}
    if len(devices) > MOST_DEVICES:
        return _estimate(routing, itemsize)
    sent, received, kept = Counter[int](), Counter[int](), Counter[int]()
    peers: dict[int, set[int]] = {device: set() for device in devices}
    for route in routing.all:
        source, target, bytes = route.source_device, route.target_device, _bytes(route, itemsize)
        if source == target:
            kept[source] += bytes
            continue
        sent[source] += bytes
        received[target] += bytes
        peers[source].add(target)
        peers[target].add(source)
    return Load(
        moved=max(max(sent[device], received[device]) for device in devices),
        copied=max(sent[device] + received[device] + kept[device] for device in devices),
        peers=max(map(len, peers.values())),
    )


def _estimate(routing: Routing, itemsize: int) -> Load:
    """What some target devices receive, and what a source device sends if all send alike."""
    devices = list(routing.target.grid.cells_on)
    some = devices[:: max(1, len(devices) // SAMPLE)]
    found = {device: routing.into(device) for device in some}
    far = {device: [route for route in found[device] if route.source_device != device] for device in some}
    if not any(far.values()) and routing.is_local:
        return Load(0, max(sum(_bytes(route, itemsize) for route in found[device]) for device in some), 0)
    received = [sum(_bytes(route, itemsize) for route in far[device]) for device in some]
    senders = [len({route.source_device for route in far[device]}) for device in some]
    ratio = len(devices) / len(some) / len(routing.source.grid.cells_on)
    sent, takers = sum(received) * ratio, math.ceil(sum(senders) * ratio)
    copied = sent + max(sum(_bytes(route, itemsize) for route in found[device]) for device in some)
    return Load(max(sent, *received, 1), copied, max(takers, *senders, 1), sampled=True)


def _bytes(route: Route, itemsize: int) -> int:
    return itemsize * math.prod(sum(stop - start for start, stop in dim) for dim in route.target_index)


def _completed(now: Layout, search: Search) -> Iterator[Priced]:
    """Sums along partial axes on the source's own grid: to copies, or to even parts of the longest whole dim."""
    links, bytes = search.links, largest_part(now) * search.itemsize
    for axis in now.partial_axes:
        size = now.grid.axes[axis].size
        whole = now.with_role(axis, COPY, {})
        yield Move("all_reduce", now, whole), links.seconds("all_reduce", size, bytes)
        for there in _cut_evenly(whole, axis):
            for kind in ("reduce_scatter", "all_to_all"):
                yield Move(kind, now, there), carried(links, kind, size, bytes)


def _landings(last: Layout, search: Search) -> Iterator[tuple[Layout, Priced]]:
    """Layouts from which an all_gather along one copied axis completes the target."""
    links, bytes = search.links, largest_part(last) * search.itemsize
    for axis, role in enumerate(last.roles):
        if role != COPY:
            continue
        size = last.grid.axes[axis].size
        for there in _cut_evenly(last, axis):
            seconds, kind = min((carried(links, kind, size, bytes), kind) for kind in ("all_gather", "all_to_all"))
            yield there, (Move(kind, there, last), seconds)


def _cut_evenly(layout: Layout, axis: int) -> Iterable[Layout]:
    """The layout with a copied axis splitting the longest dim that no axis splits, if it is long enough."""
    size = layout.grid.axes[axis].size
    whole = [dim for dim, table in enumerate(layout.ranges) if table is None and layout.shape[dim] >= size]
    if not whole:
        return ()
    dim = max(whole, key=lambda dim: layout.shape[dim])
    roles = tuple(split(dim) if i == axis else COPY for i in range(len(layout.roles)))
    table = even(layout.shape, layout.grid, roles).ranges[dim]
    return (layout.with_role(axis, split(dim), {dim: table}),)

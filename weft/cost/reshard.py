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

from weft.cost.links import Links
from weft.cost.moves import GridMoves, Priced, largest_part
from weft.cost.refine import coalesce, common, same_parts
from weft.ir.layout import COPY, PARTIAL, Layout, even, split
from weft.ir.program import Move
from weft.ir.routes import Route, Routing

__all__ = ["Load", "Resharder", "Search", "cheapest", "measure", "same_parts"]

MOST_DEVICES = 32
"""The cost of an exchange on a larger grid is taken from this many of its devices."""


def cheapest(source: Layout, target: Layout, itemsize: int, links: Links) -> tuple[Move, ...]:
    """The moves that bring a tensor from one layout to another at least cost."""
    return Resharder(links).path(source, target, itemsize)


class Resharder:
    """Cheapest paths under one table of links, each searched once."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._known: dict[tuple[Layout, Layout, int], tuple[tuple[Move, ...], float]] = {}

    def path(self, source: Layout, target: Layout, itemsize: int) -> tuple[Move, ...]:
        """The moves of the cheapest path."""
        return self._find(source, target, itemsize)[0]

    def seconds(self, source: Layout, target: Layout, itemsize: int) -> float:
        """What the cheapest path costs."""
        return self._find(source, target, itemsize)[1]

    def _find(self, source: Layout, target: Layout, itemsize: int) -> tuple[tuple[Move, ...], float]:
        key = (source, target, itemsize)
        known = self._known.get(key)
        if known is None:
            assert source.shape == target.shape, f"{source} and {target} are of different tensors"
            known = ((), 0.0) if same_parts(source, target) else Search(source, target, itemsize, self.links).run()
            self._known[key] = known
        return known


class Search:
    """One shortest path."""

    def __init__(self, source: Layout, target: Layout, itemsize: int, links: Links) -> None:
        self.target, self.itemsize, self.links = target, itemsize, links
        first, last = coalesce(source), coalesce(target)
        pair = common(first, last)
        self._first, self._last = pair or (first, last)
        self._moves = GridMoves(self._last, itemsize, links) if pair else None
        # Where the source already holds the parts of its rewritten form, it starts there.
        self._start = self._first if same_parts(source, self._first) else source
        self._landings = [] if pair or last.grid.repeats else list(_landings(last, self))

    def run(self) -> tuple[tuple[Move, ...], float]:
        """The moves, and what they cost."""
        numbers = itertools.count()
        heap: list[tuple[float, int, int, Layout, tuple[Move, ...]]] = [(0.0, 0, next(numbers), self._start, ())]
        done: set[Layout] = set()
        while heap:
            cost, length, _, now, path = heapq.heappop(heap)
            if now in done:
                continue
            done.add(now)
            if now == self.target or same_parts(now, self.target):
                return path, cost
            for move, seconds in self._after(now):
                if move.target not in done:
                    heapq.heappush(heap, (cost + seconds, length + 1, next(numbers), move.target, (*path, move)))
        raise AssertionError(f"no path from {self._start} to {self.target}")

    def _after(self, now: Layout) -> Iterator[Priced]:
        if now == self._start and now != self._first:
            yield self.direct(now, self._first)
        if now == self._last:
            yield self.direct(now, self.target)
            return
        if self._moves and now.grid == self._last.grid:
            yield from self._moves.after(now)
        for landing, priced in self._landings:
            if now == landing:
                yield priced
                return
            yield self.direct(now, landing)
        if not self._moves and now.is_partial and now.grid == self._first.grid and not now.grid.repeats:
            yield from _completed(now, self)
        yield self.direct(now, self.target)

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
            size = len(routing.group(source.grid.devices[0]))
            if size > 1:
                kinds.append(("all_to_all", self.links.seconds("all_to_all", size, load.moved * size / (size - 1))))
        kind, seconds = min(kinds, key=lambda found: found[1])
        return Move(kind, source, target), seconds + copying


@dataclass(frozen=True)
class Load:
    """What the busiest device does in an exchange: bytes to or from others, bytes copied or added, peers."""

    moved: int
    copied: int
    peers: int


def measure(routing: Routing, itemsize: int) -> Load:
    """The load of a change of layout; of a large one, that of some of its devices."""
    devices = sorted({*routing.source.grid.cells_on, *routing.target.grid.cells_on})
    if len(devices) > MOST_DEVICES:
        some = set(devices[:: len(devices) // MOST_DEVICES])
        load = _load([route for device in sorted(some) for route in routing.of(device)], some, itemsize)
        # That nothing moves must be true of all devices.
        if load.moved:
            return load
    return _load(routing.all, set(devices), itemsize)


def _load(found: Iterable[Route], devices: set[int], itemsize: int) -> Load:
    """The load of the busiest of these devices. A route between two of them may be listed twice."""
    sent, received, kept = Counter[int](), Counter[int](), Counter[int]()
    peers: dict[int, set[int]] = {device: set() for device in devices}
    for route in dict.fromkeys(found):
        source, target, bytes = route.source_device, route.target_device, _bytes(route, itemsize)
        if source == target:
            kept[source] += bytes
            continue
        sent[source] += bytes
        received[target] += bytes
        for device, peer in ((source, target), (target, source)):
            if device in devices:
                peers[device].add(peer)
    return Load(
        moved=max(max(sent[device], received[device]) for device in devices),
        copied=max(sent[device] + received[device] + kept[device] for device in devices),
        peers=max(map(len, peers.values())),
    )


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
            for kind, copied in (("reduce_scatter", bytes), ("all_to_all", 2 * bytes)):
                seconds = links.seconds(kind, size, bytes) + links.seconds("local", 1, copied)
                yield Move(kind, now, there), seconds


def _landings(last: Layout, search: Search) -> Iterator[tuple[Layout, Priced]]:
    """Layouts from which an all_gather along one copied axis completes the target."""
    links, bytes = search.links, largest_part(last) * search.itemsize
    for axis, role in enumerate(last.roles):
        if role != COPY:
            continue
        size = last.grid.axes[axis].size
        for there in _cut_evenly(last, axis):
            options = [
                (links.seconds(kind, size, bytes) + links.seconds("local", 1, copied), kind)
                for kind, copied in (("all_gather", bytes), ("all_to_all", 2 * bytes))
            ]
            seconds, kind = min(options)
            yield there, (Move(kind, there, last), seconds)


def _cut_evenly(layout: Layout, axis: int) -> Iterable[Layout]:
    """The layout with a copied axis splitting the longest dim that no axis splits, if it is long enough."""
    size = layout.grid.axes[axis].size
    whole = [dim for dim, table in enumerate(layout.ranges) if table is None and layout.shape[dim] >= size]
    if not whole or layout.roles[axis] == PARTIAL:
        return ()
    dim = max(whole, key=lambda dim: layout.shape[dim])
    roles = tuple(split(dim) if i == axis else COPY for i in range(len(layout.roles)))
    table = even(layout.shape, layout.grid, roles).ranges[dim]
    return (layout.with_role(axis, split(dim), {dim: table}),)

"""Transfers: one Move as each device sees it.

In: a Move and a device. Out: the runtime's Transfer, with the boxes to send and to receive, or None if the device
holds neither the source nor the target. Promised: all devices of a group get the same kind and group, and the i-th
piece that one sends to another is the i-th that the other receives from it. `collectives` counts what a Program runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from weft.ir.layout import Layout, Part
from weft.ir.program import Compute, Move, Program, Reshard, Sync, Use, walk
from weft.ir.routes import Route, Routing, sums_fiber
from weft.ops.book import RuleBook
from weft.runtime.layout.transfer import Piece, Transfer


class Transfers:
    """Transfers of many moves on many devices, with what they share worked out once."""

    def __init__(self) -> None:
        self._routings: dict[Move, Routing] = {}
        self._from_all: dict[tuple[Move, tuple[int, ...]], bool] = {}

    def of(self, move: Move, device: int) -> Transfer | None:
        """What `device` does in `move`; None if it takes no part."""
        return _transfer(move, device, self._routing(move))

    def into_slot(self, move: Move, device: int, slot: int) -> Transfer:
        """What `device` does in `move` for one slot of all its targets. All devices hold parts of both layouts."""
        shape = move.target.parts_on(device)[slot].shape
        found = self._through(move, device, lambda route: route.target_slot == slot)
        return replace(found, receives=_at_first(found.receives), shapes=(shape,))

    def out_of_slot(self, move: Move, device: int, slot: int) -> Transfer:
        """What `device` does in `move` with one slot of all its sources; the others count as zeros, and copies in them
        are left out: all targets take the first."""
        firsts = {(part.device, part.slot): _first_alike(move.source, part) for part in move.source.parts()}
        found = self._through(move, device, lambda route: firsts[route.source_device, route.source_slot] == slot)
        return replace(found, sends=_at_first(found.sends))

    def spelled_out(self, move: Move, device: int) -> Transfer | None:
        """The same as `of`; all-gathers and reduce-scatters are carried as such, so what only bears the name is an
        exchange."""
        found = self.of(move, device)
        if found is None or found.kind not in ("all_gather", "reduce_scatter"):
            return found
        key = move, found.group
        if key not in self._from_all:
            self._from_all[key] = _from_all(move, found.group, self._routing(move))
        return found if self._from_all[key] else replace(found, kind="exchange")

    def is_local(self, move: Move) -> bool:
        """True if nothing leaves a device."""
        return self._routing(move).is_local

    def _routing(self, move: Move) -> Routing:
        if move not in self._routings:
            self._routings[move] = Routing(move.source, move.target)
        return self._routings[move]

    def _through(self, move: Move, device: int, wanted: Callable[[Route], bool]) -> Transfer:
        """A move with some of its routes."""
        routing = self._routing(move)
        group = routing.group(device)
        leaves = any(wanted(route) and route.source_device != route.target_device for route in _within(routing, group))
        group = group if leaves else (device,)
        found = tuple(filter(wanted, routing.of(device)))
        return _pieces(move, device, group, found)


def transfer(move: Move, device: int) -> Transfer | None:
    """What `device` does in `move`; None if it takes no part. For many devices keep a `Transfers`."""
    return Transfers().of(move, device)


def _transfer(move: Move, device: int, routing: Routing) -> Transfer | None:
    source, target = move.source, move.target
    if device not in source.grid.cells_on and device not in target.grid.cells_on:
        return None
    group = routing.group(device)
    shapes = tuple(part.shape for part in target.parts_on(device))
    if move.kind == "all_reduce" and sums_fiber(source, target) and len(group) > 1:
        return Transfer("all_reduce", group, (), (), shapes)
    return _pieces(move, device, group, routing.of(device))


def _pieces(move: Move, device: int, group: tuple[int, ...], found: Sequence[Route]) -> Transfer:
    return Transfer(
        kind=_kind(move, group),
        group=group,
        sends=tuple(_sent(route) for route in found if route.source_device == device),
        receives=tuple(_received(route) for route in found if route.target_device == device),
        shapes=tuple(part.shape for part in move.target.parts_on(device)),
        add=move.source.is_partial,
    )


def _first_alike(layout: Layout, part: Part) -> int:
    """The first slot of a part's device that holds the same."""
    alike = (one for one in layout.parts_on(part.device) if (one.ranges, one.share) == (part.ranges, part.share))
    return next(alike).slot


def _within(routing: Routing, group: tuple[int, ...]) -> Iterator[Route]:
    return (route for device in group for route in routing.of(device))


def _at_first(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The pieces as those of the only slot."""
    return tuple(replace(piece, slot=0) for piece in pieces)


def _kind(move: Move, group: tuple[int, ...]) -> str:
    """A sum that is not a plain one along a fiber travels in pieces; a group of one needs no collective."""
    if len(group) == 1:
        return "local"
    return "exchange" if move.kind in ("all_reduce", "local") else move.kind


def _from_all(move: Move, group: tuple[int, ...], routing: Routing) -> bool:
    """True if every member that gets something gets it from all that hold something."""
    pairs = {(route.source_device, route.target_device) for route in _within(routing, group)}
    holders = {device for device in group if any(all(part.shape) for part in move.source.parts_on(device))}
    takers = {taker for _, taker in pairs}
    return all((holder, taker) in pairs for taker in takers for holder in holders - {taker})


def _sent(route: Route) -> Piece:
    return Piece(route.target_device, route.source_slot, route.source_index)


def _received(route: Route) -> Piece:
    return Piece(route.source_device, route.target_slot, route.target_index)


PHASES = ("forward", "backward", "gradients", "inside")
LOCAL = "local"


@dataclass(frozen=True)
class Collectives:
    """Kinds and counts, phase by phase; phases without any are absent."""

    counts: dict[str, dict[str, int]]

    def __str__(self) -> str:
        lines = []
        for phase, kinds in self.counts.items():
            lines.append(f"{phase:<9}  " + ", ".join(f"{kind} x{n}" for kind, n in sorted(kinds.items())))
        return "\n".join(lines) or "none"


def collectives(program: Program, book: RuleBook | None = None) -> Collectives:
    """The collectives of one step: between ops, forward and backward, of gradients, and inside operators that
    communicate. Local moves are not counted; one inside a recomputed region is counted once, where it stands."""
    rules = book or RuleBook(program.graph)
    found: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
    for step in walk(program.steps):
        match step:
            case Use(_, moves):
                found["forward"].update(_kinds(moves))
            case Reshard(_, _, forward, backward):
                found["forward"].update(_kinds(forward))
                found["backward"].update(_kinds(backward or ()))
            case Sync(_, _, paths):
                found["gradients"].update(kind for path in paths for kind in _kinds(path))
            case Compute(op, layout, _, _):
                exchanges = rules.rule(program.graph.by_name[op], layout.algorithm).algorithms
                for name in layout.cut_names:
                    if name in exchanges:
                        found["inside"].update((*exchanges[name].forward, *exchanges[name].backward))
            case _:
                pass
    return Collectives({phase: dict(kinds) for phase, kinds in found.items() if kinds})


def _kinds(moves: Iterable[Move]) -> Iterator[str]:
    return (move.kind for move in moves if move.kind != LOCAL)

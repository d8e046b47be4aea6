"""Transfers: one Move as each device sees it.

In: a Move and a device. Out: the runtime's Transfer, with the boxes to send and to receive, or None if the device
holds neither the source nor the target. Promised: all devices of a group get the same kind and group, and the i-th
piece that one sends to another is the i-th that the other receives from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from weft.ir.layout import Layout, Part
from weft.ir.program import Move
from weft.ir.routes import Route, Routing, sums_fiber
from weft.runtime.layout.transfer import Piece, Transfer


class Transfers:
    """Transfers of many moves on many devices, with what they share worked out once."""

    def __init__(self) -> None:
        self._routing = cache(lambda move: Routing(move.source, move.target))
        self._from_all = cache(self._is_from_all)

    def of(self, move: Move, device: int) -> Transfer | None:
        """What `device` does in `move`; None if it takes no part."""
        source, target, routing = move.source, move.target, self._routing(move)
        if device not in source.grid.cells_on and device not in target.grid.cells_on:
            return None
        group = routing.group(device)
        if move.kind == "all_reduce" and sums_fiber(source, target) and len(group) > 1:
            return Transfer("all_reduce", group, (), (), tuple(part.shape for part in target.parts_on(device)))
        return _pieces(move, device, group, routing.of(device))

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
        return found if self._from_all(move, found.group) else replace(found, kind="exchange")

    def is_local(self, move: Move) -> bool:
        """True if nothing leaves a device."""
        return self._routing(move).is_local

    def _is_from_all(self, move: Move, group: tuple[int, ...]) -> bool:
        """True if every member that gets something gets it from all that hold something."""
        pairs = {(route.source_device, route.target_device) for route in _within(self._routing(move), group)}
        holders = {device for device in group if any(all(part.shape) for part in move.source.parts_on(device))}
        takers = {taker for _, taker in pairs}
        return all((holder, taker) in pairs for taker in takers for holder in holders - {taker})

    def _through(self, move: Move, device: int, wanted: Callable[[Route], bool]) -> Transfer:
        """A move with some of its routes."""
        routing = self._routing(move)
        group = routing.group(device)
        leaves = any(wanted(route) and route.source_device != route.target_device for route in _within(routing, group))
        group = group if leaves else (device,)
        found = tuple(filter(wanted, routing.of(device)))
        return _pieces(move, device, group, found)


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


def _sent(route: Route) -> Piece:
    return Piece(route.target_device, route.source_slot, route.source_index)


def _received(route: Route) -> Piece:
    return Piece(route.source_device, route.target_slot, route.target_index)

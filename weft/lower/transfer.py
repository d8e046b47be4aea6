"""Transfers: one Move as each device sees it.

In: a Move and a device. Out: the runtime's Transfer, with the boxes to send and to receive, or None if the device
holds neither the source nor the target. Promised: all devices of a group get the same kind and group, and the i-th
piece that one sends to another is the i-th that the other receives from it.
"""

from __future__ import annotations

from weft.ir.program import Move
from weft.ir.routes import Route, Routing, adds, sums_fiber
from weft.runtime.script import Piece, Transfer


class Transfers:
    """Transfers of many moves on many devices, with what they share worked out once."""

    def __init__(self) -> None:
        self._routings: dict[Move, Routing] = {}

    def of(self, move: Move, device: int) -> Transfer | None:
        """What `device` does in `move`; None if it takes no part."""
        routing = self._routings.get(move)
        if routing is None:
            routing = self._routings[move] = Routing(move.source, move.target)
        return _transfer(move, device, routing)


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
    found = routing.of(device)
    return Transfer(
        kind=_kind(move, group),
        group=group,
        sends=tuple(_sent(route) for route in found if route.source_device == device),
        receives=tuple(_received(route) for route in found if route.target_device == device),
        shapes=shapes,
        add=adds(source, target),
    )


def _kind(move: Move, group: tuple[int, ...]) -> str:
    """A sum that is not a plain one along a fiber travels in pieces; a group of one needs no collective."""
    if len(group) == 1:
        return "local"
    return "exchange" if move.kind in ("all_reduce", "local") else move.kind


def _sent(route: Route) -> Piece:
    return Piece(route.target_device, route.source_slot, route.source_index)


def _received(route: Route) -> Piece:
    return Piece(route.source_device, route.target_slot, route.target_index)

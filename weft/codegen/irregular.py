"""Irregular changes of layout as table entries: the transfers of one rank, as JSON.

In: moves and a rank. Out: what `load.py` reads back. A transfer that stays on its rank names no
rank, so that ranks that do the same share one entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.ir.layout import Layout
from weft.ir.program import Move, Program
from weft.lower.transfer import Transfers
from weft.runtime.layout.transfer import Piece, Transfer
from weft.runtime.program.batch import dtype_name
from weft.runtime.program.load import SELF


def move_entry(
    program: Program,
    transfers: Transfers,
    rank: int,
    value: str,
    forward: Iterable[Move],
    backward: Iterable[Move] | None,
    tensor: str,
    source: str | None,
) -> dict[str, Any]:
    """One rank's entry. `source`: the value it comes from; None for a stored tensor."""
    target = program.values[value].layout
    origin: Layout = program.stored[tensor] if source is None else program.values[source].layout
    held = _shapes(target, rank)
    ways = _by_chunk(program, transfers, rank, value) if source is None and backward is not None else None
    return {
        "forward": transfer_entries(transfers, forward, rank),
        "backward": None if backward is None else transfer_entries(transfers, backward, rank),
        "source_shapes": _shapes(origin, rank),
        "target_shapes": held,
        "dtype": dtype_name(program.graph.tensors[tensor].dtype),
        "chunks": len(held) > 1,
        **({} if ways is None else {"by_chunk": ways}),
    }


def _shapes(layout: Layout, rank: int) -> tuple[tuple[int, ...], ...]:
    """Local shapes of a rank's slots."""
    return tuple(part.shape for part in layout.parts_on(rank))


def _by_chunk(program: Program, transfers: Transfers, rank: int, value: str) -> list[dict[str, Any]] | None:
    """How a trained parameter comes chunk by chunk, and its gradient is reduced; None if it is to come at once: it is
    there already, or kept, or not all ranks that hold it run the same chunks."""
    held = program.values[value]
    stored = program.stored[held.tensor]
    if held.tensor in program.kept or held.grad is None:
        return None
    count = len(held.layout.grid.cells_on.get(rank, ()))
    there, back = Move("exchange", stored, held.layout), Move("exchange", held.grad, stored)
    sides = {device: len(cells) for device, cells in stored.grid.cells_on.items()}
    same = [{d: len(cells) for d, cells in one.grid.cells_on.items()} for one in (held.layout, held.grad)]
    if (
        count < 2
        or set(sides.values()) != {1}
        or same != [dict.fromkeys(sides, count)] * 2
        or transfers.is_local(there)
    ):
        return None
    return [
        {
            "forward": [_entry(transfers.into_slot(there, rank, chunk), rank)],
            "backward": [_entry(transfers.out_of_slot(back, rank, chunk), rank)],
        }
        for chunk in range(count)
    ]


def transfer_entries(transfers: Transfers, moves: Iterable[Move], rank: int) -> list[dict[str, Any]]:
    """The transfers of the moves that a rank takes part in."""
    found = (transfers.spelled_out(move, rank) for move in moves)
    return [_entry(one, rank) for one in found if one is not None]


def _entry(transfer: Transfer, rank: int) -> dict[str, Any]:
    myself = rank if transfer.kind == "local" else None
    group = [SELF if number == myself else number for number in transfer.group]
    return {"kind": transfer.kind, "group": group, **exchange_entry(transfer, myself)}


def exchange_entry(transfer: Transfer, myself: int | None = None) -> dict[str, Any]:
    """What a transfer sends and receives; `myself`: the rank that SELF stands for."""

    def pieces(items: tuple[Piece, ...]) -> list[Any]:
        return [(SELF if piece.peer == myself else piece.peer, piece.slot, piece.index) for piece in items]

    return {
        "sends": pieces(transfer.sends),
        "receives": pieces(transfer.receives),
        "shapes": transfer.shapes,
        "add": transfer.add,
    }

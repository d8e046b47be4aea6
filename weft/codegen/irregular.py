"""Irregular changes of layout as table entries: the transfers of one rank, as JSON.

In: moves and a rank. Out: what `runtime/program_files.py` reads back. A transfer that stays on its rank names no
rank, so that ranks that do the same share one entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.ir.layout import Layout
from weft.ir.program import Move, Program
from weft.lower.script import shapes
from weft.lower.transfer import Transfers
from weft.runtime.program_files import SELF
from weft.runtime.script import Piece, Transfer


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
    held = shapes(target, rank)
    return {
        "forward": transfer_entries(transfers, forward, rank),
        "backward": None if backward is None else transfer_entries(transfers, backward, rank),
        "source_shapes": shapes(origin, rank),
        "target_shapes": held,
        "dtype": str(program.graph.tensors[tensor].dtype).removeprefix("torch."),
        "chunks": len(held) > 1,
    }


def transfer_entries(transfers: Transfers, moves: Iterable[Move], rank: int) -> list[dict[str, Any]]:
    """The transfers of the moves that a rank takes part in."""
    found = (transfers.of(move, rank) for move in moves)
    return [_entry(one, rank) for one in found if one is not None]


def _entry(transfer: Transfer, rank: int) -> dict[str, Any]:
    local = transfer.kind == "local"

    def peer(number: int) -> int:
        return SELF if local and number == rank else number

    def pieces(items: tuple[Piece, ...]) -> list[Any]:
        return [(peer(piece.peer), piece.slot, piece.index) for piece in items]

    return {
        "kind": transfer.kind,
        "group": [peer(number) for number in transfer.group],
        "sends": pieces(transfer.sends),
        "receives": pieces(transfer.receives),
        "shapes": transfer.shapes,
        "add": transfer.add,
    }

"""A reference for moves: a whole tensor, its parts under a layout, and what moves make of them.

Values are integers in float64, so that sums are exact in any order and every comparison is for equality.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import numpy as np

from weft.ir.layout import Layout
from weft.ir.program import Move
from weft.ir.routes import Routing
from weft.lower.transfer import Transfers
from weft.runtime.layout.transfer import Index, Transfer

Parts = dict[tuple[int, int], np.ndarray]
"""The tensor of each (device, slot)."""


def whole_tensor(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1000, 1000, shape).astype(np.float64)


def positions(intervals: Iterable[tuple[int, int]]) -> np.ndarray:
    found = [np.arange(start, stop) for start, stop in intervals]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


@functools.cache
def box(index: Index) -> tuple[np.ndarray, ...]:
    return np.ix_(*map(positions, index))


def make_parts(layout: Layout, whole: np.ndarray, seed: int = 1) -> Parts:
    """Parts of the tensor; random addends along partial axes, the same ones in all copies."""
    rng = np.random.default_rng(seed)
    shares = list(itertools.product(*(range(layout.grid.axes[a].size) for a in layout.partial_axes)))
    addends = {share: rng.integers(-1000, 1000, whole.shape).astype(np.float64) for share in shares[1:]}
    addends[shares[0]] = whole - sum(addends.values(), np.zeros_like(whole))
    return {(part.device, part.slot): np.array(addends[part.share][box(part.ranges)]) for part in layout.parts()}


def check_parts(layout: Layout, parts: Parts, whole: np.ndarray) -> None:
    """Each part is right; along partial axes the addends of each box sum to it and copies agree."""
    assert parts.keys() == {(part.device, part.slot) for part in layout.parts()}
    sums: dict[tuple, np.ndarray] = {}
    seen: dict[tuple, np.ndarray] = {}
    for part in layout.parts():
        value = parts[part.device, part.slot]
        assert value.shape == part.shape, f"{value.shape} is not {part.shape} in cell {part.cell} of {layout}"
        first = seen.setdefault((part.ranges, part.share), value)
        assert np.array_equal(first, value), f"copies differ in cell {part.cell} of {layout}"
        if first is value:
            sums[part.ranges] = sums.get(part.ranges, 0) + value
    for ranges, value in sums.items():
        assert np.array_equal(value, whole[box(ranges)]), f"wrong values at {ranges} of {layout}"


def run_routes(move: Move, parts: Parts) -> Parts:
    """What a move makes of the parts, by its routes."""
    result = {(part.device, part.slot): np.zeros(part.shape) for part in move.target.parts()}
    add = move.source.is_partial
    for route in Routing(move.source, move.target).all:
        assert move.kind != "local" or route.source_device == route.target_device, f"{move} is not local: {route}"
        piece = parts[route.source_device, route.source_slot][box(route.source_index)]
        into = result[route.target_device, route.target_slot]
        if add:
            into[box(route.target_index)] += piece
        else:
            assert not into[box(route.target_index)].any(), f"{route} covers elements twice"
            into[box(route.target_index)] = piece
    return result


def run_transfers(move: Move, parts: Parts) -> Parts:
    """What a move makes of the parts, by each device's Transfer, all in lockstep."""
    devices = sorted({*move.source.grid.cells_on, *move.target.grid.cells_on})
    made = Transfers()
    transfers = {device: transfer for device in devices if (transfer := made.of(move, device)) is not None}
    assert made.of(move, 1 + max(devices)) is None
    mail: dict[tuple[int, int], list[np.ndarray]] = {}
    for device, transfer in transfers.items():
        _check_group(device, transfer, transfers)
        for piece in transfer.sends:
            mail.setdefault((device, piece.peer), []).append(parts[device, piece.slot][box(piece.index)])
    result: Parts = {}
    for device, transfer in transfers.items():
        if transfer.kind == "all_reduce":
            assert not transfer.sends and not transfer.receives
            result[device, 0] = sum(parts[member, 0] for member in transfer.group)
            assert result[device, 0].shape == transfer.shapes[0]
            continue
        result.update({(device, slot): np.zeros(shape) for slot, shape in enumerate(transfer.shapes)})
        for piece in transfer.receives:
            at = box(piece.index)
            value = mail[piece.peer, device].pop(0)
            result[device, piece.slot][at] = value + (result[device, piece.slot][at] if transfer.add else 0)
    assert not any(mail.values()), "pieces sent that nobody received"
    return result


def _check_group(device: int, transfer: Transfer, transfers: dict[int, Transfer]) -> None:
    assert device in transfer.group and len(set(transfer.group)) == len(transfer.group)
    # A plain sum names its group in fiber order, so that all copies of the sum add alike.
    assert transfer.kind == "all_reduce" or list(transfer.group) == sorted(transfer.group)
    for member in transfer.group:
        other = transfers[member]
        assert (other.kind, other.group, other.add) == (transfer.kind, transfer.group, transfer.add)
    assert {piece.peer for piece in (*transfer.sends, *transfer.receives)} <= set(transfer.group)
    assert transfer.kind != "local" or transfer.group == (device,)

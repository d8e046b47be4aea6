"""Moves as typed steps: a Move is proven to carry its source Layout to its target Layout, whatever the tensor holds.

In: Moves. Out: how many collectives each takes; a FaultError if it does not carry the tensor.
A tensor *lies as* a Layout if every part holds its ranges of the addend that its share names, and the shares make up
the tensor. Proven of the transfers that `transfer.py` derives, device by device: members enter together, every piece
that is sent is expected, each lands on its own indices, and a target part receives, on every index, exactly the source
shares that `routes.assign` gives to its share, each once. As every source share is given to one target share, the
result lies as the target.

Where both layouts have one grid without repeated devices, an axis is *fixed* if it is copy in both, or partial in
both with every addend kept at its coordinate, or splits in both a dim that only fixed axes split, by the same table.
All routes of a cell lead to cells with its coordinates on the fixed axes: `Routing` takes a copy at the cell's own
coordinates, equal disjoint range lists meet only themselves, and a kept addend stays. Nor do the boxes of the other
dims depend on these coordinates, and those of the fixed dims are all of the part, on both ends (no part of a fixed dim
is empty: an empty one meets nothing). So the transfers along
one slice of the grid (fixed coordinates held) are those along any other, with devices renamed and fixed dims of other
lengths, and what is proven of one slice holds for all. Two opposite corners are followed; a pair of cells has one
route, so the order of pieces plays no part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from weft.errors import LayoutError
from weft.ir.layout import COPY, PARTIAL, Cell, Layout, Part, verify_layout
from weft.ir.program import Move
from weft.ir.ranges import Box, Ranges, apart, ascending, count, disjoint, select, tidy, volume
from weft.ir.routes import assign
from weft.lower.transfer import Transfers
from weft.runtime.layout.transfer import Piece, Transfer


class FaultError(Exception):
    """Raised deep inside with a short fact; the check adds the neighbourhood."""


def require(holds: bool, fact: str) -> None:
    """Refuse what does not hold."""
    if not holds:
        raise FaultError(fact)


def num_shares(layout: Layout) -> int:
    """How many addends the layout keeps apart."""
    return math.prod(layout.grid.sizes[axis] for axis in layout.partial_axes)


def difference(found: Layout, needed: Layout) -> str:
    """How a tensor lies, and how it should: what an error says after the tensor's name."""
    reason = ""
    if num_shares(found) > num_shares(needed):
        reason = "is not complete: it "
    elif num_shares(found) < num_shares(needed):
        reason = "would be counted more than once: it "
    elif set(found.grid.devices) != set(needed.grid.devices):
        reason = "is not on the right devices: it "
    return f"{reason}lies as {found}, but {needed} is needed"


class MoveProofs:
    """Proofs of layouts and moves, each done once."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self._sound: set[Layout] = set()
        self._moves: dict[Move, int] = {}

    def sound(self, layout: Layout, what: str) -> None:
        """A layout must cover its tensor, on devices that there are. `what` it is the layout of."""
        if layout in self._sound:
            return
        try:
            verify_layout(layout, what)
        except LayoutError as error:
            raise FaultError(error.message) from None
        if len(layout.ranges) != len(layout.shape):
            raise FaultError(f"{what}: {len(layout.ranges)} dims have ranges, but the shape is {list(layout.shape)}")
        if not all(0 <= device < self.num_devices for device in layout.grid.devices):
            raise FaultError(f"{what} lies on {layout.grid}, but devices are 0 to {self.num_devices - 1}")
        self._sound.add(layout)

    def of(self, move: Move) -> int:
        """Prove a move; how many collectives it takes."""
        known = self._moves.get(move)
        if known is None:
            try:
                known = self._moves[move] = self._prove(move)
            except FaultError as fault:
                raise FaultError(f"a {move.kind} from {move.source} to {move.target}: {fault}") from None
        return known

    def _prove(self, move: Move) -> int:
        source, target = move.source, move.target
        self.sound(source, "its source")
        self.sound(target, "its target")
        require(source.shape == target.shape, "these are tensors of different shapes")
        assigned = assign(source, target)
        shares, takers = set(_shares(source)), set(_shares(target))
        require(set(assigned) == shares and set(assigned.values()) <= takers, "an addend has no taker")
        slices, number = _slices(move, assigned)
        transfers = Transfers()
        counts = {_Slice(move, devices, transfers, assigned).prove() for devices in slices}
        require(len(counts) == 1, "devices that do the same enter different numbers of collectives")
        return counts.pop() * number


def _shares(layout: Layout) -> list[Cell]:
    return list(itertools.product(*(range(layout.grid.sizes[axis]) for axis in layout.partial_axes)))


def _slices(move: Move, assigned: dict[Cell, Cell]) -> tuple[list[list[int]], int]:
    """The devices of the slices to follow, and how many slices there are in all."""
    source, target = move.source, move.target
    if source.grid != target.grid or source.grid.repeats:
        return [sorted({*source.grid.devices, *target.grid.devices})], 1
    fixed = [axis for axis in range(len(source.roles)) if _is_fixed(source, target, axis, assigned)]
    sizes = source.grid.sizes
    slices: dict[Cell, list[int]] = {}
    for last in (False, True):
        corner = {axis: sizes[axis] - 1 if last else 0 for axis in fixed}
        choices = [(corner[axis],) if axis in corner else range(size) for axis, size in enumerate(sizes)]
        slices[tuple(corner.values())] = [source.grid.device(cell) for cell in itertools.product(*choices)]
    return list(slices.values()), math.prod(sizes[axis] for axis in fixed)


def _is_fixed(source: Layout, target: Layout, axis: int, assigned: dict[Cell, Cell]) -> bool:
    role = source.roles[axis]
    if role != target.roles[axis]:
        return False
    if role == COPY:
        return True
    if role == PARTIAL:
        at, there = source.partial_axes.index(axis), target.partial_axes.index(axis)
        return all(share[at] == taker[there] for share, taker in assigned.items())
    table = source.ranges[role.dim]
    if source.axes_of[role.dim] != target.axes_of[role.dim] or table != target.ranges[role.dim]:
        return False
    return table is not None and all(map(count, table))


class _Slice:
    """The proof of one move on devices that talk to nobody else."""

    def __init__(self, move: Move, devices: Sequence[int], transfers: Transfers, assigned: dict[Cell, Cell]) -> None:
        self.move = move
        self.made: dict[int, Transfer] = {}
        for device in devices:
            found = transfers.of(move, device)
            if found is None:
                raise FaultError(f"device {device} takes no part")
            self.made[device] = found
        self.given: dict[Cell, list[Cell]] = {}
        for share, taker in assigned.items():
            self.given.setdefault(taker, []).append(share)
        self.sent: dict[tuple[int, int], list[Piece]] = {}
        for device, mine in self.made.items():
            for piece in mine.sends:
                self.sent.setdefault((device, piece.peer), []).append(piece)
        self._sums: dict[int, tuple[tuple[Ranges, ...], list[Cell]]] = {}
        """By first member: groups are apart (`_matched`)."""
        self._selected: dict[tuple[Ranges, Ranges], Ranges] = {}

    def prove(self) -> int:
        """Returns the number of collectives."""
        found = self._matched()
        for device, mine in self.made.items():
            try:
                self._received(device, mine)
            except FaultError as fault:
                raise FaultError(f"on device {device} {fault}") from None
        return found

    def _received(self, device: int, mine: Transfer) -> None:
        parts = self.move.target.parts_on(device)
        if mine.kind == "all_reduce":
            require(len(parts) == 1, "a sum goes into several parts")
            self._summed(parts[0], mine)
            return
        pieces = self._arriving(device, mine)
        for part in parts:
            self._filled(part, pieces.get(part.slot, []), mine.add)
        require(len(pieces) <= len(parts), "a piece is for a part that is not there")

    def _matched(self) -> int:
        members: dict[tuple[int, ...], list[int]] = {}
        received: dict[tuple[int, int], list[Piece]] = {}
        for device, mine in self.made.items():
            members.setdefault(mine.group, []).append(device)
            for piece in mine.receives:
                received.setdefault((piece.peer, device), []).append(piece)
        for group, present in members.items():
            if sorted(group) != sorted(present):
                raise FaultError(f"of the group {group} devices {present} enter the collective")
            if len({self.made[device].kind for device in group}) > 1:
                raise FaultError(f"members of the group {group} enter different collectives")
        groups = {device: group for group, present in members.items() for device in present}
        if self.sent.keys() != received.keys():
            here, there = min(self.sent.keys() ^ received.keys())
            told = (
                "sends what is not expected by" if (here, there) in self.sent else "does not send what is expected by"
            )
            raise FaultError(f"device {here} {told} device {there}")
        for (here, there), pieces in self.sent.items():
            if groups[here] is not groups[there]:
                raise FaultError(f"a piece from device {here} to {there} leaves the group {groups[here]}")
            sent, expected = (
                [tuple(map(count, piece.index)) for piece in each] for each in (pieces, received[here, there])
            )
            if sent != expected:
                raise FaultError(f"device {here} sends {sent} to device {there}, which expects {expected}")
        return sum(len(group) > 1 for group in members)

    def _summed(self, part: Part, mine: Transfer) -> None:
        require(not mine.sends and not mine.receives, "a sum comes with pieces")
        ranges, shares = self._addends(mine.group)
        require(ranges == part.ranges, "a sum is over other indices than the part has")
        require(shares == sorted(self.given.get(part.share, [])), "a sum has other addends than the part needs")

    def _addends(self, group: tuple[int, ...]) -> tuple[tuple[Ranges, ...], list[Cell]]:
        """What the members of a sum hold: the indices, the same for all, and the shares."""
        known = self._sums.get(group[0])
        if known is None:
            held = [self.move.source.parts_on(peer) for peer in group]
            require(all(len(parts) == 1 for parts in held), "a sum takes several parts of one device")
            parts = [only for (only,) in held]
            require(
                all(part.ranges == parts[0].ranges for part in parts), "a sum is over parts that hold different indices"
            )
            known = self._sums[group[0]] = parts[0].ranges, sorted(part.share for part in parts)
        return known

    def _arriving(self, device: int, mine: Transfer) -> dict[int, list[tuple[Piece, Piece]]]:
        """The pieces for each slot, with what was sent."""
        found: dict[int, list[tuple[Piece, Piece]]] = {}
        seen: dict[int, int] = {}
        for piece in mine.receives:
            order = seen.get(piece.peer, 0)
            seen[piece.peer] = order + 1
            found.setdefault(piece.slot, []).append((piece, self.sent[piece.peer, device][order]))
        return found

    def _filled(self, part: Part, pieces: list[tuple[Piece, Piece]], add: bool) -> None:
        """Every index of a target part receives every addend meant for it once."""
        boxes: dict[Cell, list[Box]] = {}
        for piece, sent in pieces:
            held = self.move.source.parts_on(piece.peer)
            require(sent.slot < len(held), "a part is sent that is not there")
            origin = held[sent.slot]
            require(len(piece.index) == len(sent.index) == len(part.ranges), "a piece has other dims than the part")
            for dim, (here, there) in enumerate(zip(piece.index, sent.index, strict=True)):
                same = self._at(part.ranges[dim], here) == self._at(origin.ranges[dim], there)
                require(same, "a piece lands on other indices")
            boxes.setdefault(origin.share, []).append(ascending(piece.index))
        wanted = self.given.get(part.share, [])
        size = math.prod(part.shape)
        require(boxes.keys() == (set(wanted) if size else set()), "other addends arrive than the part needs")
        require(add or len(wanted) <= 1, "addends are put over each other")
        for found in boxes.values():
            require(sum(map(volume, found)) == size and apart(found), "a part is not covered once")

    def _at(self, ranges: Ranges, positions: Ranges) -> Ranges:
        """The indices at positions, which must exist."""
        known = self._selected.get((ranges, positions))
        if known is None:
            inside = all(0 <= start < stop <= count(ranges) for start, stop in positions)
            require(inside and disjoint([positions]), "positions lie outside of a part")
            known = self._selected[ranges, positions] = tidy(select(ranges, positions))
        return known

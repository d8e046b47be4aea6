"""What the devices hold while a Program is followed without running it, and what moves do to it.

In: contents of local tensors by device and slot, and Moves. Out: the contents after. Every collective is matched: all
members of a group enter it, and what one sends another expects. What makes no sense becomes a reason (a string) in
place of a Content: harmless until somebody reads it. What could not even run is a FaultError.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.oracle.terms import Content, added, placed, taken, zeros
from weft.ir.graph import Graph
from weft.ir.layout import verify_layout
from weft.ir.program import Move, Value
from weft.ir.ranges import Ranges, overlap, text, tidy
from weft.lower.proof.moves import FaultError
from weft.lower.transfer import Transfers
from weft.runtime.layout.transfer import Transfer

Where = tuple[int, int]
"""Device and slot."""

Held = Content | str
"""What a local tensor holds, or why that makes no sense."""


@dataclass
class Tracked:
    """A value at one point of the Program: contents and the gradients that flow back into it, per local tensor."""

    name: str
    contents: dict[Where, Held]
    grads: dict[Where, list[Held]] = field(default_factory=dict)

    def at(self, device: int, slot: int) -> Held | None:
        """What a step finds there: a value that a device holds once serves all of its slots."""
        return self.contents.get(self.where(device, slot))

    def where(self, device: int, slot: int) -> Where:
        return (device, slot) if (device, 1) in self.contents else (device, 0)

    def receive(self, where: Where, grad: Held) -> None:
        self.grads.setdefault(where, []).append(grad)

    def gradient(self, where: Where) -> Held:
        """The sum of what flowed back, zeros if nothing did."""
        content = self.contents[where]
        if isinstance(content, str):
            return content
        grads = self.grads.get(where, [])
        for grad in grads:
            if isinstance(grad, str):
                return grad
            if grad.dims != content.dims:
                return f"a gradient of {content.tensor} arrives for other indices than its value has"
        good = [grad for grad in grads if isinstance(grad, Content)]
        return added([zeros(content.tensor, content.dims), *good])


class Mover:
    """Applies Moves to contents, and counts the collectives."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.transfers = Transfers()
        self.collectives = 0

    def moved(self, contents: dict[Where, Held], moves: Iterable[Move]) -> dict[Where, Held]:
        for first, move in zip(itertools.chain([True], itertools.repeat(False)), moves, strict=False):
            for layout in (move.source, move.target):
                verify_layout(layout, f"a {move.kind}")
            devices = {*move.source.grid.devices, *move.target.grid.devices}
            if move.source.shape != move.target.shape or not devices <= set(range(self.num_devices)):
                raise FaultError(f"a {move.kind} from {move.source} to {move.target} cannot be carried out")
            if first:
                # generated code gives the first move what its source layout says that a device holds, nothing else
                here = {where: held for where, held in contents.items() if where[0] in devices}
                planned = {(part.device, part.slot): part.shape for part in move.source.parts()}
                refuse_other_shapes(here, planned, f"what a {move.kind} finds")
            found = {device: self.transfers.of(move, device) for device in sorted(devices)}
            transfers = {device: made for device, made in found.items() if made is not None}
            self._match(move, transfers)
            contents = self._apply(move, contents, transfers)
        return contents

    def _match(self, move: Move, transfers: dict[int, Transfer]) -> None:
        """All members of a group must enter the same collective, and what one sends another must expect."""
        for device, mine in transfers.items():
            for peer in mine.group:
                theirs = transfers.get(peer)
                if theirs is None or (theirs.kind, theirs.group) != (mine.kind, mine.group):
                    raise FaultError(f"device {device} enters {mine.kind} over {mine.group}, device {peer} does not")
                sent = [_size(piece.index) for piece in mine.sends if piece.peer == peer]
                expected = [_size(piece.index) for piece in theirs.receives if piece.peer == device]
                if sent != expected:
                    raise FaultError(f"device {device} sends {sent} to device {peer}, which expects {expected}")
            if len(mine.group) > 1 and mine.group[0] == device:
                self.collectives += 1

    def _apply(self, move: Move, contents: dict[Where, Held], transfers: dict[int, Transfer]) -> dict[Where, Held]:
        result: dict[Where, Held] = {w: held for w, held in contents.items() if w[0] not in transfers}
        for device, mine in transfers.items():
            if mine.kind == "all_reduce":
                result[device, 0] = self._summed(mine.group, contents)
                continue
            for slot, part in enumerate(move.target.parts_on(device)):
                result[device, slot] = self._received(device, slot, mine, transfers, contents, part.ranges)
        return result

    def _summed(self, group: Sequence[int], contents: dict[Where, Held]) -> Held:
        for peer in group:
            if (peer, 0) not in contents or (peer, 1) in contents:
                raise FaultError(f"device {peer} enters a sum over {tuple(group)} without one part of the value")
        parts = [contents[peer, 0] for peer in group]
        good = [part for part in parts if isinstance(part, Content)]
        if len({part.shape for part in good}) > 1:
            raise FaultError(f"a sum over {tuple(group)} of parts of {good[0].tensor} that have different shapes")
        if len(good) < len(parts):
            return next(part for part in parts if isinstance(part, str))
        if len({(part.tensor, part.dims) for part in good}) > 1:
            return f"a sum over parts of {good[0].tensor} that hold different indices"
        return added(good)

    def _received(
        self,
        device: int,
        slot: int,
        mine: Transfer,
        transfers: dict[int, Transfer],
        contents: dict[Where, Held],
        declared: tuple[Ranges, ...],
    ) -> Held:
        pieces = []
        tensor = next((held.tensor for held in contents.values() if isinstance(held, Content)), "")
        seen: dict[int, int] = {}
        for piece in mine.receives:
            order = seen.get(piece.peer, 0)
            seen[piece.peer] = order + 1
            if piece.slot != slot:
                continue
            sent = [s for s in transfers[piece.peer].sends if s.peer == device][order]
            held = contents.get((piece.peer, sent.slot))
            if held is None:
                raise FaultError(f"device {piece.peer} sends a part of a value that it does not hold")
            if isinstance(held, str):
                return held
            pieces.append((piece.index, cut_out(held, sent.index)))
        return placed(tensor, declared, pieces, mine.add)


def cut_out(content: Content, index: tuple[Ranges, ...]) -> Content:
    """A part at these positions, which must exist."""
    shape = content.shape
    if len(index) != len(shape) or any(stop > size for at, size in zip(index, shape, strict=True) for _, stop in at):
        raise FaultError(f"positions {show_box(index)} are cut out of a part of {content.tensor} of shape {shape}")
    return taken(content, index)


def put_together(
    pieces: Sequence[tuple[tuple[Ranges, ...], Content] | str], tensor: str, declared: tuple[Ranges, ...], add: bool
) -> Held:
    """What the chunks of a loop give, as one part."""
    good = [piece for piece in pieces if not isinstance(piece, str)]
    if len(good) < len(pieces):
        return next(piece for piece in pieces if isinstance(piece, str))
    return placed(tensor, declared, good, add)


def restricted(grad: Content, content: Content) -> Content:
    """The gradient of a whole, seen by one of its parts."""
    return taken(grad, tuple(_positions_in(mine, theirs) for mine, theirs in zip(grad.dims, content.dims, strict=True)))


def _positions_in(held: Ranges, wanted: Ranges) -> Ranges:
    return tuple((s.source, s.source + s.length) for s in overlap(held, wanted))


def refuse_malformed(value: Value, graph: Graph) -> None:
    """A value must be of a tensor of the graph, and its layouts layouts of that."""
    if value.tensor not in graph.tensors:
        raise FaultError(f"{value.name} is of no tensor of the graph")
    for layout in (value.layout, value.grad):
        if layout is not None and layout.shape != graph.tensors[value.tensor].sizes:
            raise FaultError(f"{value.name} has a layout of another shape: {layout}")
        if layout is not None:
            verify_layout(layout, value.name)
    if value.grad is not None and value.grad.grid != value.layout.grid:
        raise FaultError(f"{value.name} lies on {value.layout.grid}, but its gradient on {value.grad.grid}")


Shapes = Mapping[Where, tuple[int, ...] | None]
"""By place; None where nothing sensible is."""


def refuse_other_shapes(contents: Mapping[Where, Held], planned: Shapes, what: str) -> None:
    """What arrives must have the planned shapes in the planned places."""
    found = shapes_of(contents)
    if found.keys() != planned.keys() or any(
        shape != planned[where] and shape is not None and planned[where] is not None for where, shape in found.items()
    ):
        raise FaultError(f"{what} has the shapes {found} by device and slot, but {dict(planned)} is planned")


def shapes_of(contents: Mapping[Where, Held]) -> Shapes:
    """The shapes of local tensors."""
    return {where: held.shape if isinstance(held, Content) else None for where, held in contents.items()}


def _size(index: tuple[Ranges, ...]) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in intervals) for intervals in index)


def show_box(box: tuple[Ranges, ...]) -> str:
    return "[" + ", ".join(text(tidy(ranges)) for ranges in box) + "]"

"""StageIO: what the pieces of a pipeline send each other, micro-batch by micro-batch.

In: for each tensor that crosses between two pieces, what this rank sends and receives of it. Out: the tensor in the
layout of the piece that takes it; its gradient, on the way back, in that of the piece that gave it.

Promised: several pieces on a rank that take the same of a tensor get it by one message, which the first one takes;
their gradients, if they go back alike, are added up here and sent once, by whoever comes last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weft.runtime.layout.execute import assembled, expected, real_dtype, taken
from weft.runtime.layout.transfer import Transfer
from weft.runtime.links.transport import Expected, Transport
from weft.runtime.weights.gradient import Gradient


@dataclass(frozen=True)
class Crossing:
    """A tensor that one piece gives and another takes, as this rank sees it: None where it has no part in it.

    Args:
        place: the user's line that makes it.
        backward: None too if no gradient flows.
        spared: ranks that get what they need of it by the message for another piece.
        comes_for: by rank that something comes from, the piece that the message is written for.
        back_for: the piece for which the gradient goes back, added to that of this one.
    """

    tensor: str
    source: str
    target: str
    place: str
    dtype: torch.dtype
    forward: Transfer | None
    backward: Transfer | None
    trained: bool
    spared: frozenset[int] = frozenset()
    comes_for: Mapping[int, str] = field(default_factory=dict)
    back_for: str = ""

    def message(self, peer: int) -> tuple[str, str, int]:
        """Tensor, piece and sender of the message by which it comes from a rank."""
        return self.tensor, self.comes_for.get(peer, self.target), peer

    @property
    def back(self) -> tuple[str, str]:
        """Tensor and piece of the message by which its gradient goes back."""
        return self.tensor, self.back_for or self.target


def forward_tag(tensor: str, target: str, micro: int) -> str:
    return f"{tensor} for {target}, micro-batch {micro}"


def backward_tag(tensor: str, target: str, micro: int) -> str:
    return f"gradient of {tensor} for {target}, micro-batch {micro}"


@dataclass(frozen=True)
class Readers:
    """How many pieces of this rank take each message, and how many add to each gradient that goes back."""

    messages: Mapping[tuple[str, str, int], int]
    gradients: Mapping[tuple[str, str], int]

    @staticmethod
    def of(taken: list[Crossing]) -> Readers:
        peers = [(one, {piece.peer for piece in one.forward.receives}) for one in taken if one.forward is not None]
        return Readers(
            Counter(one.message(peer) for one, found in peers for peer in found),
            Counter(one.back for one in taken if one.trained),
        )


@dataclass
class _Came:
    """What came by a message, and how many pieces are still to come for it."""

    tensors: list[Tensor]
    missing: int


@dataclass
class _Going:
    """A gradient that goes back, and how many pieces are still to add to it."""

    missing: int
    total: Gradient = field(default_factory=Gradient)


class StageIO:
    """The messages of one rank of a pipeline."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._came: dict[tuple[tuple[str, str, int], int], _Came] = {}
        self._going: dict[tuple[tuple[str, str], int], _Going] = {}

    def begin(self) -> None:
        """A step begins."""
        self._came, self._going = {}, {}

    def send(self, crossing: Crossing, micro: int, tensor: Tensor) -> None:
        """Give a tensor to the piece that takes it."""
        assert crossing.forward is not None, f"{crossing.tensor} does not leave this rank"
        tag = forward_tag(crossing.tensor, crossing.target, micro)
        self.post(crossing.forward, tag, tensor, spared=crossing.spared)

    def receive(self, crossing: Crossing, micro: int, readers: Readers) -> Tensor:
        """Take a tensor."""
        transfer = crossing.forward
        assert transfer is not None, f"{crossing.tensor} does not come to this rank"
        came: dict[int, list[Tensor]] = {}
        for peer, expects in expected(transfer, real_dtype(crossing.dtype)).items():
            message = crossing.message(peer)
            shared = self._came.pop((message, micro), None)
            if shared is None:
                found = self._take(peer, forward_tag(*message[:2], micro), expects, crossing.place)
                shared = _Came(found, readers.messages[message])
            shared.missing -= 1
            if shared.missing:
                self._came[message, micro] = shared
            came[peer] = shared.tensors
        return assembled(transfer, came, crossing.dtype, self.transport.device)[0]

    def send_back(self, crossing: Crossing, micro: int, gradient: Tensor | None, readers: Readers) -> None:
        """Give the gradient of a tensor to the piece that made it; the last of those that took it sends it."""
        transfer, key = crossing.backward, (crossing.back, micro)
        assert transfer is not None, f"no gradient of {crossing.tensor} leaves this rank"
        going = self._going.pop(key, None) or _Going(readers.gradients[crossing.back])
        going.missing -= 1
        if gradient is not None:
            going.total.add(gradient)
        if going.missing:
            self._going[key] = going
            return
        found = going.total.total
        if found is None:
            assert crossing.forward is not None
            found = torch.zeros(
                crossing.forward.shapes[0], dtype=real_dtype(crossing.dtype), device=self.transport.device
            )
        self.post(transfer, backward_tag(*crossing.back, micro), found)

    def receive_back(self, crossing: Crossing, micro: int) -> Tensor:
        """Take the gradient of a tensor that was given."""
        assert crossing.backward is not None, f"no gradient of {crossing.tensor} comes to this rank"
        return self.take(crossing.backward, backward_tag(*crossing.back, micro), crossing.dtype, crossing.place)

    def post(self, transfer: Transfer, tag: str, tensor: Tensor, *, spared: frozenset[int] = frozenset()) -> None:
        """Send the parts of a tensor that others need, but not to those that are spared."""
        for peer, tensors in taken(transfer, [tensor.detach()], spared).items():
            self.transport.post(peer, tag, tensors)

    def take(self, transfer: Transfer, tag: str, dtype: torch.dtype, place: str = "") -> Tensor:
        """Put together what others send of a tensor."""
        wanted = expected(transfer, real_dtype(dtype))
        came = {peer: self._take(peer, tag, expects, place) for peer, expects in wanted.items()}
        return assembled(transfer, came, dtype, self.transport.device)[0]

    def _take(self, peer: int, tag: str, expects: Sequence[Expected], place: str) -> list[Tensor]:
        """A message; whoever waits for it in vain says which line it is of."""
        before = self.transport.doing
        self.transport.doing = replace(before, place=place)
        came = self.transport.take(peer, tag, expects)
        self.transport.doing = before
        return came

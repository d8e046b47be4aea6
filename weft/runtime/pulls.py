"""Pulls: kept weights brought up to date from the parts that other ranks store, several in one exchange.

In: wholes, each with this rank's part and the transfer that once made it. Out: the same memory, with the parts of all.
Among processes of one host the wholes lie where the others see them, and each member reads there what the others have
updated, straight to its place; elsewhere parts are exchanged. Pulls go on in the second lane of the transport.

Promised: pulls are made and started in one order on all members, since the same program asks for the weights; when one
has been waited for, all members have read what it needs, and parts may be changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from weft.runtime.rooms import WORTH, Rooms, Waits, of_job, rooms_for
from weft.runtime.script import Index, Transfer
from weft.runtime.shared_parts import Lent, narrowed, pull
from weft.runtime.transfers import Arriving, Exchanges, put, size
from weft.runtime.transport import Doing, Expected, Transport, listed

BUCKET = 8 << 20
"""Bytes of wholes that are brought in one exchange."""
KIND = "all_gather"

Transfers = tuple[Transfer, ...]


@dataclass
class Whole:
    """The wholes of one parameter for one way of using it, one per chunk, as of some turn."""

    name: str
    tensors: list[Tensor]
    parts: tuple[Tensor, ...]
    transfers: Transfers
    turn: int = -1

    @property
    def is_gathered(self) -> bool:
        """True if it is put together from parts that lie side by side."""
        if len(self.transfers) != 1 or self.transfers[0].kind != KIND or self.transfers[0].add:
            return False
        return len(self.parts) == 1 and len(self.tensors) == 1 and self.parts[0].dtype == self.tensors[0].dtype

    @cached_property
    def indices(self) -> tuple[Index | None, ...]:
        """What each member has of it, in group order."""
        (transfer,) = self.transfers
        found = {piece.peer: piece.index for piece in transfer.receives}
        return tuple(found.get(peer) for peer in transfer.group)


@torch.no_grad()
def lie_in(whole: Whole, rank: int) -> None:
    """Let a parameter lie in its whole, where it is a contiguous piece of it."""
    if not whole.is_gathered:
        return
    view = _own(whole, rank)
    if view is not None and view.is_contiguous() and view.shape == whole.parts[0].shape:
        whole.parts[0].data = view


def _own(whole: Whole, rank: int) -> Tensor | None:
    index = whole.indices[whole.transfers[0].group.index(rank)]
    return None if index is None else narrowed(whole.tensors[0], index)


class Pull:
    """Wholes that are brought up to date together.

    Args:
        rooms: where all members see them; None if they cannot.
    """

    def __init__(self, wholes: Sequence[Whole], transport: Transport, rooms: Rooms | None) -> None:
        self.wholes = tuple(wholes)
        self._transport, self._group = transport, wholes[0].transfers[0].group
        self._lent: list[Lent] = []
        self._rooms = rooms
        self._end: Callable[[], None] | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Begin; what was waited for may be started again."""
        before = self._transport.doing
        self._transport.doing = Doing(f"use of {listed([one.name for one in self.wholes])}")
        # nothing here is the model's: whoever watches its operators need not see it
        with torch._C.DisableTorchFunction():
            self._fill_in()
            self._end = self._exchanged() if self._rooms is None else self._shared(self._rooms)
        self._transport.doing = before

    def wait(self) -> None:
        """Until all are up to date."""
        if self._end is not None:
            end, self._end = self._end, None
            end()

    def _fill_in(self) -> None:
        """This rank's own parts, where parameters do not lie in their wholes."""
        for whole in self.wholes:
            view, (part,) = _own(whole, self._transport.rank), whole.parts
            index = whole.indices[self._group.index(self._transport.rank)]
            if index is not None and (view is None or view.data_ptr() != part.data_ptr()):
                with _unsafe_preserve_version_counter(whole.tensors[0]):
                    put(whole.tensors[0], index, part.detach())

    def _shared(self, rooms: Rooms) -> Callable[[], None]:
        if not self._lent:
            self._move_in(rooms)
        alike = torch.empty(sum(one.tensor.numel() for one in self._lent), dtype=self._dtype, device="meta")
        handle: Waits[None] = rooms.start(KIND, alike, partial(pull, lent=self._lent))

        def end() -> None:
            handle.wait()

        return end

    @property
    def _dtype(self) -> torch.dtype:
        return self.wholes[0].tensors[0].dtype

    def _move_in(self, rooms: Rooms) -> None:
        """Lay the wholes, and with them the parameters, where others see them."""
        for whole in self.wholes:
            lent = rooms.lent(whole.tensors[0], whole.indices)
            if lent.tensor is not whole.tensors[0]:
                whole.tensors = [lent.tensor]
                lie_in(whole, self._transport.rank)
            self._lent.append(lent)
        rooms.leave()

    def _exchanged(self) -> Callable[[], None]:
        transport = self._transport
        assert isinstance(transport, Exchanges)
        parts = [whole.parts[0].detach() for whole in self.wholes if whole.parts[0].numel()]
        expects: dict[int, list[Expected]] = {}
        for peer, pieces in self._others():
            expects[peer] = [(size(index), self._dtype) for _, index in pieces]
        arriving = transport.start_exchange(dict.fromkeys(expects, parts), expects, self._group, KIND)
        assert arriving is not None
        return partial(self._put, arriving)

    def _others(self) -> list[tuple[int, list[tuple[Whole, Index]]]]:
        """By member, what comes from there."""
        found = []
        for member, peer in enumerate(self._group):
            if peer != self._transport.rank:
                pairs = ((whole, whole.indices[member]) for whole in self.wholes)
                found.append((peer, [(whole, index) for whole, index in pairs if index is not None]))
        return found

    @torch.no_grad()
    def _put(self, arriving: Arriving) -> None:
        came = arriving.wait()
        for peer, pieces in self._others():
            for (whole, index), tensor in zip(pieces, came[peer], strict=True):
                with _unsafe_preserve_version_counter(whole.tensors[0]):
                    put(whole.tensors[0], index, tensor)


def make_pulls(wholes: Sequence[Whole], transport: Transport, *, bucket: int = BUCKET) -> list[Pull]:
    """Pulls of those that can be pulled, in order; wholes of one group and dtype share one until it is full.

    Where a group has little in all, they come faster one by one."""
    if not isinstance(of_job(transport, ())[0], Exchanges):
        return []
    unfilled: dict[tuple[tuple[int, ...], torch.dtype], list[Whole]] = {}
    made: list[list[Whole]] = []
    gathered = [whole for whole in wholes if whole.is_gathered]
    num_bytes = Counter[tuple[int, ...]]()
    for whole in gathered:
        num_bytes[whole.transfers[0].group] += whole.tensors[0].nbytes
    for whole in gathered:
        if num_bytes[whole.transfers[0].group] < WORTH:
            continue
        key = whole.transfers[0].group, whole.tensors[0].dtype
        if key not in unfilled:
            unfilled[key] = []
            made.append(unfilled[key])
        unfilled[key].append(whole)
        if sum(one.tensors[0].nbytes for one in unfilled[key]) >= bucket:
            del unfilled[key]
    return [Pull(each, transport, _rooms(each, transport)) for each in made]


def _rooms(wholes: Sequence[Whole], transport: Transport) -> Rooms | None:
    """Room for these and no more: what is kept would keep the rest too."""
    room = sum(Rooms.room_of(tuple(one.tensors[0].shape), one.tensors[0].dtype) for one in wholes)
    return rooms_for(transport, wholes[0].transfers[0].group, room + 1, brief=False)

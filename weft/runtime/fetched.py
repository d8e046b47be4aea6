"""Fetched weights: parts of parameters, read where the other processes of one host store them.

In: gathers that a module has asked for before, some at a time. Out: the wholes, when they have come. Once a run has
shown which parameters are gathered, their parts are laid into memory that all members of the group see; from then on
each member reads the others' parts straight to their place, in the second lane of the transport, and nothing is sent.
Where members do not see each other's memory, or there is little to gather, weights come another way (`ahead.py`).

Promised: parts are laid down and fetched in one order on all members, since the same program asks for them; when a
fetch has been waited for, all members have read what it needs, and parts may be changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from weft.runtime.gathers import Gather, Key, key_of
from weft.runtime.rooms import WORTH, Rooms, Waits, of_job, rooms_for
from weft.runtime.script import Index
from weft.runtime.shared_parts import fetch
from weft.runtime.spares import Spares
from weft.runtime.transfers import Exchanges, covers
from weft.runtime.transport import Doing, listed

KIND = "all_gather"
SPARE = 4 << 20
"""Bytes of a whole up to which its memory is used again: new memory costs more than what is read into it."""
SPARES = 8 << 20
"""Bytes of all memory that waits to be used again."""


@dataclass(frozen=True)
class _Way:
    """How a gather is fetched: what each member has of it, in group order, and where parts lie."""

    parts: tuple[Index, ...]
    rooms: Rooms


class Fetching:
    """Wholes under way."""

    def __init__(self, handle: Waits[None], wholes: Sequence[Tensor]) -> None:
        self._handle, self._wholes = handle, list(wholes)

    def wait(self) -> list[Tensor]:
        self._handle.wait()
        found, self._wholes = self._wholes, []
        return found


class Fetches:
    """What one module fetches."""

    def __init__(self) -> None:
        self._ways: dict[Key, _Way | None] = {}
        self._new: dict[Key, Gather] = {}
        self._spares = Spares(SPARES)

    def takes(self, gather: Gather) -> bool:
        """True if a gather can be fetched; if it is new, from the next run on."""
        key = key_of(gather)
        if key not in self._ways:
            self._new.setdefault(key, gather)
        return self._ways.get(key) is not None

    @torch.no_grad()
    def settle(self) -> None:
        """Lay parts that were asked for since the last time where others see them."""
        by_group: dict[tuple[int, ...], list[tuple[Gather, tuple[Index, ...]]]] = {}
        for key, gather in self._new.items():
            parts = _parts(gather)
            if parts is None:
                self._ways[key] = None
            else:
                by_group.setdefault(gather.transfers[0].group, []).append((gather, parts))
        self._new = {}
        for gathers in by_group.values():
            self._move_in(gathers)

    @torch.no_grad()
    def start(self, gathers: Sequence[Gather]) -> Fetching:
        """Begin to fetch weights of one group, all of which can be."""
        # nothing here is the model's: whoever watches its operators need not see it
        with torch._C.DisableTorchFunction():
            ways = [self._way(gather) for gather in gathers]
            rooms, transport = ways[0].rooms, gathers[0].transport
            notes = [rooms.note(gather.stored) for gather in gathers]
            own = [gather.stored.detach() for gather in gathers]
            into = [self._memory(gather) for gather in gathers]
            alike = torch.empty(sum(one.nbytes for one in into), dtype=torch.uint8, device="meta")
            before = transport.doing
            transport.doing = Doing(f"use of {listed([gather.name for gather in gathers])}")
            work = partial(fetch, notes=notes, parts=[way.parts for way in ways], own=own, into=into)
            handle: Waits[None] = rooms.start(KIND, alike, work)
            transport.doing = before
        return Fetching(handle, into)

    def _way(self, gather: Gather) -> _Way:
        way = self._ways[key_of(gather)]
        assert way is not None, f"{gather.name} is not fetched"
        if not way.rooms.holds(gather.stored):
            # it was given other memory
            self._move_in([(gather, way.parts)])
            way = self._ways[key_of(gather)]
            assert way is not None
        return way

    def _move_in(self, gathers: Sequence[tuple[Gather, tuple[Index, ...]]]) -> None:
        """Lay the parts of one group side by side, in memory that they fill."""
        transport, group = gathers[0][0].transport, gathers[0][0].transfers[0].group
        known = any(self._ways.get(key_of(gather)) is not None for gather, _ in gathers)
        enough = known or sum(gather.num_bytes for gather, _ in gathers) >= WORTH
        stored = {id(gather.stored): gather.stored for gather, _ in gathers}
        size = sum(Rooms.room_of(tuple(part.shape), part.dtype) for part in stored.values())
        rooms = rooms_for(transport, group, size + 1, brief=False) if enough else None
        for part in stored.values() if rooms is not None else ():
            assert rooms is not None
            part.data = rooms.lent(part.detach(), ()).tensor
        for gather, parts in gathers:
            self._ways[key_of(gather)] = None if rooms is None else _Way(parts, rooms)
        if rooms is not None:
            rooms.leave()

    def _memory(self, gather: Gather) -> Tensor:
        """Memory for a whole."""
        shape, like = gather.transfers[0].shapes[0], gather.stored
        if gather.num_bytes > SPARE:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        return self._spares.take(prod(shape), like).view(shape)


def _parts(gather: Gather) -> tuple[Index, ...] | None:
    """What each member has of a whole, in group order; None if it does not consist of one part of each."""
    if len(gather.transfers) != 1 or not isinstance(of_job(gather.transport, ())[0], Exchanges):
        return None
    (transfer,) = gather.transfers
    if transfer.kind != KIND or transfer.add or len(transfer.shapes) != 1:
        return None
    found = {piece.peer: piece.index for piece in transfer.receives}
    if len(found) != len(transfer.receives) or set(found) != set(transfer.group):
        return None
    # others read this member's part from its beginning to its end
    assert all(covers(piece.index, tuple(gather.stored.shape)) for piece in transfer.sends), f"{gather.name} is cut"
    return tuple(found[peer] for peer in transfer.group)

"""Gathering ahead: a weight that is about to be needed is on its way while the one before it is used.

In: the gathers of a run (a forward, or a backward) one after the other, each under a key. Out: what each brings. The
order of a run is that of the one before; when a gather has come, the next one is started, in a lane of its own, and
waited for where it is asked for. One is under way at a time, so no more than one whole weight is held too early.

Promised: gathers start in one order on all members, since the same program asks for them; one that is not asked for
after all is waited for and let go.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.runtime.script import Transfer
from weft.runtime.transfers import Pending, execute_all, start_all
from weft.runtime.transport import Doing, Transport


@dataclass(frozen=True)
class Gather:
    """How a parameter is brought to where it is used."""

    name: str
    stored: Tensor
    transfers: tuple[Transfer, ...]
    transport: Transport

    @torch.no_grad()
    def now(self) -> Tensor:
        self.transport.doing = Doing(f"use of {self.name}")
        return execute_all(self.transfers, [self.stored.detach()], self.transport, dtype=self.stored.dtype)[0]

    @torch.no_grad()
    def start(self) -> Pending | None:
        """Begin, where the transport can do so in the background."""
        return start_all(self.transfers, [self.stored.detach()], self.transport)


class Asks(Protocol):
    """Whoever brings a gathered weight."""

    def get(self, gather: Gather) -> Tensor: ...


class Ahead:
    """The gathers of one module in one direction."""

    def __init__(self) -> None:
        self._next: dict[Hashable, Gather] = {}
        """What followed each gather when it was last asked for."""
        self._last: Gather | None = None
        self._pending: tuple[Hashable, int, Pending] | None = None

    def begin(self) -> None:
        """A run begins: weights may have changed since the one before."""
        self._drop()
        self._last = None

    def get(self, gather: Gather) -> Tensor:
        """What a gather brings."""
        key = _key(gather)
        if self._last is not None:
            self._next[_key(self._last)] = gather
        self._last = gather
        found = self._waited(key, gather)
        following = self._next.get(key)
        if following is not None and following.stored is not gather.stored:
            pending = following.start()
            if pending is not None:
                self._pending = _key(following), following.stored._version, pending
        return gather.now() if found is None else found

    def _waited(self, key: Hashable, gather: Gather) -> Tensor | None:
        """What was started for this one; None if nothing was."""
        if self._pending is None:
            return None
        started, version, pending = self._pending
        self._pending = None
        (found,) = pending.wait()
        return found if started == key and version == gather.stored._version else None

    def _drop(self) -> None:
        if self._pending is not None:
            self._pending[2].wait()
            self._pending = None


def _key(gather: Gather) -> Hashable:
    return gather.name, gather.transfers

"""Groups: the backend's groups of a process, each made once.

In: a store that all ranks of the job reach, and the ranks of a group. Out: the backend's group, or pipes between
processes of one host, which need no backend. Promised: a group is made when its members first need it; ranks outside it
have nothing to do with it. One group serves every order in which its ranks are named.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from weft.runtime.links.backend import GLOO, Backend, PrefixStore, Store
from weft.runtime.links.p2p_mailbox import StreamPaths
from weft.runtime.links.transport import Group

if TYPE_CHECKING:
    from weft.runtime.shm.pipes import Pipes


class Groups:
    """The groups of one process.

    Args:
        store: any prefix of it that all ranks share.
        local: all ranks are on this host.
        by_pipe: ranks of one host may talk past the backend.
    """

    def __init__(self, store: Store, rank: int, backend: Backend, *, local: bool, by_pipe: bool = True) -> None:
        self.rank, self.backend, self.local = rank, backend, local
        self._by_pipe = by_pipe and local
        self._num_messages = 0
        self._store, self._links = store, backend.links(local=local)
        self._made: dict[tuple[str, Group], Any] = {}
        self._pipes: dict[tuple[str, Group], Pipes | None] = {}

    def get(self, ranks: Group, lane: str) -> Any:
        """The group of these ranks. Calls of different lanes do not wait for each other."""
        members = tuple(sorted(ranks))
        found = self._made.get((lane, members))
        if found is None:
            store = self._prefixed(members, lane)
            found = self.backend.make_group(store, members.index(self.rank), len(members), self._links)
            self._made[lane, members] = found
        return found

    def pipes(self, ranks: Group, lane: str, look: Callable[[], None] = lambda: None) -> Pipes | None:
        """Pipes between these ranks, who all ask for them; None where they cannot reach each other so.

        Args:
            look: called while waiting for them; raises if that is in vain.
        """
        members = tuple(sorted(ranks))
        if not (self._by_pipe and self.backend.host_waits and hasattr(os, "memfd_create")):
            return None
        if (lane, members) not in self._pipes:
            from weft.runtime.shm.pipes import meet  # noqa: PLC0415 - loaded where it is used only

            store, position = self._prefixed(members, lane), members.index(self.rank)
            self._pipes[lane, members] = meet(store, position, len(members), look)
        return self._pipes[lane, members]

    def messages(self, num_ranks: int, lane: str) -> tuple[Any, StreamPaths | None]:
        """What point-to-point messages travel by: a new gloo group of all ranks, and what else they need."""
        if num_ranks == 1:
            return None, None
        self._num_messages += 1
        everybody, lane = tuple(range(num_ranks)), f"{lane} {self._num_messages}"
        links = self._links if self.backend is GLOO else GLOO.links(local=self.local)
        heads = GLOO.make_group(self._prefixed(everybody, lane), self.rank, num_ranks, links)
        return heads, None if self.backend.host_waits else self._stream_ways(num_ranks, lane)

    def _stream_ways(self, num_ranks: int, lane: str) -> StreamPaths:
        """Groups of two, used once here: the first use waits for the other rank, and all meet in one order now."""
        device = torch.device(self.backend.device_type, torch.accelerator.current_device_index())
        ways: tuple[dict[int, Any], dict[int, Any]] = {}, {}
        for sender, taker in itertools.permutations(range(num_ranks), 2):
            if self.rank in (sender, taker):
                position, word = int(self.rank == taker), torch.zeros(1, dtype=torch.uint8, device=device)
                store = PrefixStore(f"{lane}/{sender} to {taker}", self._store)
                group = self.backend.make_group(store, position, 2, self._links)
                (group.recv([word], 0, 0) if position else group.send([word], 1, 0)).wait()
                ways[position][sender if position else taker] = group
        return StreamPaths(*ways, device)

    def _prefixed(self, members: Group, lane: str) -> Store:
        return PrefixStore(f"{lane}/{'-'.join(map(str, members))}", self._store)

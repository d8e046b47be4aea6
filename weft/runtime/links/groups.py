"""Groups: the backend's groups of a process, each made once.

In: a store that all ranks of the job reach, and the ranks of a group. Out: the backend's group, or pipes between
processes of one host, which need no backend. Promised: a group is made when its members first ask for it; ranks outside
it have nothing to do with it; its name says which ranks it is of, and for what. One group serves every order in which
its ranks are named.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from weft.runtime.links.backend import FOREVER, GLOO, Backend, PrefixStore, Store
from weft.runtime.links.transport import Group

if TYPE_CHECKING:
    from weft.runtime.shm.pipes import Pipes


CPU = torch.device("cpu")


def name_of(ranks: Group) -> str:
    """Ranks in few words.

    >>> name_of((0, 1, 2)), name_of((1, 5, 9)), name_of((0, 1, 5))
    ('ranks 0-2', 'ranks 1-9 by 4', 'ranks 0,1,5')
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) < 3 or step < 1 or ranks != tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"ranks {','.join(map(str, ranks))}"
    return f"ranks {ranks[0]}-{ranks[-1]}{f' by {step}' if step > 1 else ''}"


class Groups:
    """The groups of one process.

    Args:
        store: any prefix of it that all ranks share.
        local: all ranks are on this host.
        by_pipe: ranks of one host may talk past the backend.
        timeout: that the backend gives one call; the transport keeps time itself if not given.
        device: of this rank.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        backend: Backend,
        *,
        local: bool,
        by_pipe: bool = True,
        timeout: timedelta = FOREVER,
        device: torch.device = CPU,
    ) -> None:
        self.rank, self.backend, self.local = rank, backend, local
        self._by_pipe, self._timeout, self._device = by_pipe and local, timeout, device
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
            found = self._made[lane, members] = self._make(store, members, f"weft {lane}: {name_of(members)}")
        return found

    def pipes(
        self,
        ranks: Group,
        lane: str,
        look: Callable[[], None] = lambda: None,
        gone: Callable[[int], str] = "rank {} has gone".format,
    ) -> Pipes | None:
        """Pipes between these ranks, who all ask for them; None where they cannot reach each other so.

        Args:
            look: called while waiting for them; raises if that is in vain.
            gone: says that a rank has gone.
        """
        members = tuple(sorted(ranks))
        if not (self._by_pipe and hasattr(os, "memfd_create")):
            return None
        if (lane, members) not in self._pipes:
            from weft.runtime.shm.pipes import meet  # noqa: PLC0415 - loaded where it is used only

            store, position = self._prefixed(members, lane), members.index(self.rank)
            found = self._pipes[lane, members] = meet(store, position, len(members), look)
            if found is not None:
                found.told = lambda at: gone(members[at])
        return self._pipes[lane, members]

    def messages(self, num_ranks: int, lane: str) -> Any:
        """What point-to-point messages travel by: a new gloo group of all ranks."""
        if num_ranks == 1:
            return None
        self._num_messages += 1
        everybody = tuple(range(num_ranks))
        store = self._prefixed(everybody, f"{lane} {self._num_messages}")
        name = f"weft {lane}: {name_of(everybody)}"
        return GLOO.make_group(
            store, self.rank, num_ranks, self._links, ranks=everybody, name=name, device=self._device
        )

    def pair(self, sender: int, taker: int, lane: str) -> Any:
        """The group of two ranks for messages of the first for the second."""
        key = f"{lane} to", (sender, taker)
        if key not in self._made:
            store = PrefixStore(f"{lane}/{sender} to {taker}", self._store)
            self._made[key] = self._make(store, (sender, taker), f"weft {lane}: rank {sender} to rank {taker}")
        return self._made[key]

    def _make(self, store: Store, ranks: Group, name: str) -> Any:
        return self.backend.make_group(
            store,
            ranks.index(self.rank),
            len(ranks),
            self._links,
            ranks=ranks,
            name=name,
            device=self._device,
            timeout=self._timeout,
        )

    def _prefixed(self, members: Group, lane: str) -> Store:
        return PrefixStore(f"{lane}/{'-'.join(map(str, members))}", self._store)

"""Gathering ahead: weights that are about to be needed are on their way while the one before them is used.

In: the gathers of a run (a forward, or a backward) one after the other. Out: what each brings. The order of a run is
that of the one before; when what was under way has been asked for, the next is started, in a lane of its own, and
waited for where it is asked for. That is one weight, or, among processes of one host (`fetched.py`), as many as make
`TOGETHER` bytes: small ones come with the next large one, so little more than one whole weight is held too early.

Promised: gathers start in one order on all members, since the same program asks for them; one that is not asked for
after all is waited for and let go.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from weft.runtime.fetched import Fetches
from weft.runtime.gathers import Gather, Key, key_of
from weft.runtime.transfers import Pending

TOGETHER = 1 << 20
"""Bytes from which on no more weights are fetched in one go."""
MANY = 32
"""Weights that are fetched in one go at most."""


@dataclass(frozen=True)
class _Coming:
    """A weight under way: what it will be taken for, and how to wait for it."""

    key: Key
    version: int
    batch: _Batch


class _Batch:
    """Weights that come together, to be taken in order."""

    def __init__(self, pending: Pending) -> None:
        self._pending: Pending | None = pending
        self._come: deque[Tensor] = deque()

    def take(self) -> Tensor:
        if self._pending is not None:
            self._come, self._pending = deque(self._pending.wait()), None
        return self._come.popleft()


class Ahead:
    """The gathers of one module in one direction."""

    def __init__(self, fetches: Fetches) -> None:
        self._fetches = fetches
        self._next: dict[Key, Gather] = {}
        """What followed each gather when it was last asked for."""
        self._last: Key | None = None
        self._coming: deque[_Coming] = deque()

    def begin(self) -> None:
        """A run begins: weights may have changed since the one before."""
        self._drop()
        self._last = None
        self._fetches.settle()

    def get(self, gather: Gather) -> Tensor:
        """What a gather brings."""
        key = key_of(gather)
        if self._last is not None:
            self._next[self._last] = gather
        self._last = key
        found = self._waited(key, gather)
        now = self._fetches.start([gather]) if found is None and self._fetches.takes(gather) else None
        if not self._coming:
            self._start(self._following(key, gather))
        if found is not None:
            return found
        return gather.now() if now is None else now.wait()[0]

    def _waited(self, key: Key, gather: Gather) -> Tensor | None:
        """What was started for this one; None if nothing was."""
        if not self._coming:
            return None
        coming = self._coming.popleft()
        found = coming.batch.take()
        if (coming.key, coming.version) == (key, gather.stored._version):
            return found
        self._drop()
        return None

    def _following(self, key: Key, gather: Gather) -> list[Gather]:
        """What is to come next: one, or several that are fetched together."""
        found: list[Gather] = []
        after, num_bytes = self._next.get(key), 0
        while after is not None and not any(after.stored is one.stored for one in (gather, *found)):
            if found and not (self._fetches.takes(after) and after.transfers[0].group == found[0].transfers[0].group):
                break
            found.append(after)
            num_bytes += after.num_bytes
            if num_bytes >= TOGETHER or len(found) == MANY or not self._fetches.takes(after):
                break
            after = self._next.get(key_of(after))
        return found

    def _start(self, gathers: list[Gather]) -> None:
        if not gathers:
            return
        pending = self._fetches.start(gathers) if self._fetches.takes(gathers[0]) else gathers[0].start()
        if pending is not None:
            batch = _Batch(pending)
            self._coming.extend(_Coming(key_of(one), one.stored._version, batch) for one in gathers)

    def _drop(self) -> None:
        while self._coming:
            self._coming.popleft().batch.take()

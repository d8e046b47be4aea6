"""Prefetch: full weights that are about to be used are gathered while the ones before them are used.

In: the order in which a run (a forward, or a backward) will ask for weights, and its requests. Out: each full weight;
nothing here holds it afterwards. That of a forward is written in the program (`Part.use`), that of a backward is what
its forward has saved, from the last on. When all that was under way has been asked for, the next ones are started,
several in one all-gather; so not many more than `AHEAD` bytes are held too early.

Promised: gathers start in one order on all members, since the same program asks for them; what is asked for out of
order is gathered then, and what is passed over is let go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from weft.runtime.links.transport import Handle
from weft.runtime.weights.buckets import AHEAD
from weft.runtime.weights.unshard import Gather, start_gathers


class _Batch:
    """Weights that come together, to be taken in order."""

    def __init__(self, gathers: Sequence[Gather]) -> None:
        self.gathers = deque(gathers)
        self._versions = deque(one.stored._version for one in gathers)
        self._handle: Handle[list[Tensor]] | None = start_gathers(gathers)
        self._come: deque[Tensor] = deque()

    def take(self) -> Tensor | None:
        """The next one; None if its shard was changed since."""
        if self._handle is not None:
            self._come, self._handle = deque(self._handle.wait()), None
        full, version = self._come.popleft(), self._versions.popleft()
        return full if self.gathers.popleft().stored._version == version else None


class Prefetch:
    """The weights of one module in one direction."""

    def __init__(self) -> None:
        self._order: Sequence[Gather] = ()
        self._at = 0
        """How far the run has come in the order."""
        self._coming: _Batch | None = None

    def begin(self, order: Sequence[Gather]) -> None:
        """A run begins: weights may have changed since the one before."""
        self._drop()
        self._order, self._at = order, 0

    def get(self, gather: Gather) -> Tensor:
        """A full weight."""
        found = self._come(gather)
        now = start_gathers([gather]) if found is None and gather.parts is not None else None
        if self._coming is None and (following := list(self._following())):
            self._coming = _Batch(following)
        if found is not None:
            return found
        return gather.now() if now is None else now.wait()[0]

    def _come(self, gather: Gather) -> Tensor | None:
        """What was started for a request; None if nothing was."""
        at = next((at for at in range(self._at, len(self._order)) if self._order[at].use == gather.use), None)
        if at is None:
            return None
        passed, self._at = self._order[self._at : at], at + 1
        for one in passed:
            if self._coming is not None and self._coming.gathers[0] is one:
                self._taken()
        return self._taken() if self._coming is not None and self._coming.gathers[0].use == gather.use else None

    def _taken(self) -> Tensor | None:
        assert self._coming is not None
        found = self._coming.take()
        if not self._coming.gathers:
            self._coming = None
        return found

    def _following(self) -> Iterator[Gather]:
        """What is to be started next."""
        num_bytes, first = 0, None
        for one in self._order[self._at :]:
            first = first or one
            if one.parts is None or one.key != first.key or num_bytes >= AHEAD:
                break
            num_bytes += one.num_bytes
            yield one

    def _drop(self) -> None:
        while self._coming is not None:
            self._taken()

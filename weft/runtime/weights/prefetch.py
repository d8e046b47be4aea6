"""Prefetch: full weights that are about to be used are gathered while the ones before them are used.

In: the order in which a run (a forward, or a backward) will ask for weights, and its requests. Out: each full weight;
nothing here holds it afterwards. That of a forward is written in the program (`Part.use`), that of a backward is what
its forward has saved, from the last on. When all that was under way has been asked for, the next ones are started,
several in one all-gather; so not many more than `AHEAD` bytes are held too early.

Promised: gathers start in one order on all members, since the same program asks for them; what is asked for out of
order is gathered then, and what is passed over is let go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from weft.runtime.links.transport import Handle
from weft.runtime.weights.buckets import AHEAD, bucket_size
from weft.runtime.weights.unshard import Gather, start_gathers


class _Batch:
    """Weights that come together. Operators may ask for their own in any order."""

    def __init__(self, gathers: Sequence[Gather]) -> None:
        self._handle: Handle[list[Tensor]] | None = start_gathers(gathers)
        self._left = [(one, one.stored._version) for one in gathers]
        self._come: list[Tensor] = []

    def has(self, gather: Gather) -> bool:
        return self._place(gather) is not None

    def take(self, gather: Gather) -> tuple[Tensor | None, bool]:
        """One of them, None if its shard was changed since; and whether it was the last."""
        self.wait()
        at = self._place(gather)
        assert at is not None, f"{gather.name} is not under way"
        (one, version), full = self._left.pop(at), self._come.pop(at)
        return full if one.stored._version == version else None, not self._left

    def wait(self) -> None:
        if self._handle is not None:
            self._come, self._handle = self._handle.wait(), None

    def _place(self, gather: Gather) -> int | None:
        return next((at for at, (one, _) in enumerate(self._left) if one.use == gather.use), None)


class Prefetch:
    """The weights of one module in one direction."""

    def __init__(self) -> None:
        self._order: Sequence[Gather] = ()
        self._at, self._size = 0, 0
        """How far it has been started, and bytes of a batch."""
        self._coming: _Batch | None = None

    def begin(self, order: Sequence[Gather]) -> None:
        """A run begins: weights may have changed since the one before."""
        self._drop()
        self._order, self._at = order, 0
        self._size = bucket_size(sum(one.num_bytes for one in order), AHEAD)

    def get(self, gather: Gather) -> Tensor:
        """A full weight."""
        found = self._found(gather)
        now = start_gathers([gather]) if found is None and gather.parts is not None else None
        if self._coming is None and (following := list(self._following())):
            self._coming = _Batch(following)
            self._at += len(following)
        if found is not None:
            return found
        return gather.now() if now is None else now.wait()[0]

    def _found(self, gather: Gather) -> Tensor | None:
        """What was started for a request; None if nothing was."""
        if self._coming is not None and self._coming.has(gather):
            found, last = self._coming.take(gather)
            self._coming = None if last else self._coming
            return found
        at = next((at for at in range(self._at, len(self._order)) if self._order[at].use == gather.use), None)
        if at is not None:
            # the run has passed over what is under way
            self._drop()
            self._at = at + 1
        return None

    def _following(self) -> Iterator[Gather]:
        """What is to be started next."""
        num_bytes, first = 0, None
        for one in self._order[self._at :]:
            first = first or one
            if one.parts is None or one.key != first.key:
                break
            yield one
            num_bytes += one.num_bytes
            if num_bytes >= self._size:
                break

    def _drop(self) -> None:
        if self._coming is not None:
            self._coming.wait()
            self._coming = None

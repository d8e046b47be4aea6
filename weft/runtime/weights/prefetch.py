"""Prefetch: full weights that are about to be used are gathered while the ones before them are used.

In: the order in which a run (a forward, or a backward) will ask for weights, and its requests. Out: each full weight;
nothing here holds it afterwards. That of a forward is written in the program (`Part.use`), that of a backward is what
its forward has saved, from the last on. When all that was under way has been asked for, the next ones are started,
several in one all-gather; so not many more than `AHEAD` bytes are held too early. By block (`buckets.py`), the next
block is started when the first weight of one is asked for: it comes while the device computes with the one before.

Promised: gathers start in one order on all members, since the same program asks for them; what is asked for out of
order is gathered then, and what is passed over is let go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from weft.runtime.weights.buckets import AHEAD, Blocks, bucket_size
from weft.runtime.weights.unshard import Gather, batches


class _Batch:
    """Weights that come together. Operators may ask for their own in any order."""

    def __init__(self, gathers: Sequence[Gather]) -> None:
        self._handles = [(one, one.start()) for one in batches(gathers)]
        self._left = {one: one.version for one in gathers}
        self._come: dict[Gather, Tensor] = {}
        self.is_new = True
        """Nothing has been taken."""

    def has(self, gather: Gather) -> bool:
        return gather in self._left

    def take(self, gather: Gather) -> tuple[Tensor | None, bool]:
        """One of them, None if its shard was changed since; and whether it was the last."""
        self.wait()
        self.is_new = False
        version, full = self._left.pop(gather), self._come.pop(gather)
        return full if gather.version == version else None, not self._left

    def wait(self) -> None:
        while self._handles:
            together, handle = self._handles.pop(0)
            self._come.update(zip(together.gathers, handle.wait(), strict=True))


class Prefetch:
    """The weights of one module in one direction.

    Args:
        blocks: weights come block by block.
    """

    def __init__(self, blocks: Blocks | None = None) -> None:
        self._blocks = blocks
        self._order: Sequence[Gather] = ()
        self._at, self._size = 0, 0
        """How far it has been started, and bytes of a batch."""
        self._coming: list[_Batch] = []

    def begin(self, order: Sequence[Gather]) -> None:
        """A run begins: weights may have changed since the one before."""
        self._drop()
        self._order, self._at = order, 0
        self._size = bucket_size(sum(one.num_bytes for one in order), AHEAD)

    def get(self, gather: Gather) -> Tensor:
        """A full weight."""
        found = self._found(gather)
        now = batches([gather])[0].start() if found is None and gather.parts is not None else None
        if not self._coming or (self._blocks is not None and not self._coming[-1].is_new):
            self._start()
        if found is not None:
            return found
        return gather.now() if now is None else now.wait()[0]

    def _found(self, gather: Gather) -> Tensor | None:
        """What was started for a request; None if nothing was."""
        for batch in self._coming:
            if batch.has(gather):
                found, last = batch.take(gather)
                if last:
                    self._coming.remove(batch)
                return found
        at = next((at for at in range(self._at, len(self._order)) if self._order[at] is gather), None)
        if at is None:
            return None
        # the run has passed over what is under way
        self._drop()
        self._at = at + 1
        if self._blocks is None or gather.parts is None:
            return None
        self._at = at
        self._start()
        return self._found(gather)

    def _start(self) -> None:
        """Start what is to come next."""
        following = list(self._following()) if self._blocks is None else self._blocks.first(self._order[self._at :])
        self._at += len(following)
        # others come by more than one call, or from nobody: they are brought when they are asked for
        if whole := [one for one in following if one.parts is not None]:
            # at a border two blocks are used in turns; what is left of one before is let go
            self._drop(keep=2)
            self._coming.append(_Batch(whole))

    def _following(self) -> Iterator[Gather]:
        """As many as a batch has bytes, of one group."""
        num_bytes, first = 0, None
        for one in self._order[self._at :]:
            first = first or one
            if one.parts is None or one.key != first.key:
                break
            yield one
            num_bytes += one.num_bytes
            if num_bytes >= self._size:
                break

    def _drop(self, *, keep: int = 0) -> None:
        while len(self._coming) > keep:
            self._coming.pop(0).wait()

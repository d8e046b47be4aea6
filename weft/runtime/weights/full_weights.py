"""Full weights that stay: the optimizer updates the shards, every turn refreshes what is used of them.

In: a trained parameter's shard and the transfers that bring it to where it is used. Out: the full weight, in memory
that is kept: refreshed at the beginning of every turn (a forward, or a step of several micro-batches), since nobody can
see from outside whether weights were changed. A turn's first request starts the all-gathers of all weights that the
program uses, several in each, and the later ones come while the first are used. Where a shard is a contiguous piece of
its full weight, the parameter lies in it, so that it takes no memory of its own.

Promised: a backward whose forward used weights that were changed since is an error (`as_seen.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from weft.runtime.layout.execute import execute_all, together
from weft.runtime.layout.index import narrowed
from weft.runtime.layout.intern import Numbers
from weft.runtime.layout.sharding import aligned
from weft.runtime.layout.transfer import Transfer
from weft.runtime.links.transport import Handle, Transport
from weft.runtime.links.wire import LARGE
from weft.runtime.weights.buckets import FULL, Blocks, bucket_size, in_buckets
from weft.runtime.weights.unshard import Gather, Together

LIES = "_weft_lies"
"""The attribute of parameters that lie in full weights: their place."""
Key = tuple[str, int]
"""A parameter, and the number of how it is brought to where it is used."""


@dataclass
class _Full:
    """What is kept for one use: a tensor per chunk, as of some turn, and the shards that it was made from."""

    tensors: list[Tensor]
    shards: tuple[Tensor, ...]
    turn: int = -1
    coming: Handle[list[Tensor]] | None = None

    def wait(self) -> None:
        """Until it is as of its turn."""
        coming, self.coming = self.coming, None
        if coming is not None:
            coming.wait()


class FullWeights:
    """The full weights of the programs that share parameters.

    Args:
        blocks: they come block by block.
    """

    def __init__(self, blocks: Blocks | None = None) -> None:
        self._blocks = blocks
        self._kept: dict[Key, _Full] = {}
        self._numbers = Numbers()
        self._turn = 0
        self._order: Sequence[Gather] = ()
        self._started = True
        self._planned: tuple[Sequence[Gather], list[tuple[Together, list[_Full]]]] = ((), [])
        """The buckets of an order."""

    def begin(self, order: Sequence[Gather]) -> None:
        """From now on weights may be others than before. `order`: those that a program keeps, as it asks for them."""
        for one in self._kept.values():
            one.wait()
        self._order, self._started = order, False
        self._turn += 1

    def get(
        self,
        name: str,
        shards: Sequence[Tensor],
        transfers: tuple[Transfer, ...],
        transport: Transport,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """A parameter as it is used: a tensor per chunk."""
        if not self._started:
            self._start()
        key = name, self._numbers.of(transfers)
        found = self._kept.get(key)
        if found is not None:
            found.wait()
            if found.turn == self._turn and all(map(_same, shards, found.shards)):
                return found.tensors
        made = execute_all(transfers, [shard.detach() for shard in shards], transport, dtype=dtype)
        if found is None:
            # what nothing was sent for may be the shard itself
            made = [one.clone() if any(together(one, shard) for shard in shards) else one for one in made]
            found = self._kept[key] = _Full(made, tuple(shards))
        else:
            for kept, new in zip(found.tensors, made, strict=True):
                # whether a backward still needs the old content is asked of the parameter (`tape.py`)
                kept.data.copy_(new)
        found.turn, found.shards = self._turn, tuple(shards)
        return found.tensors

    def memory(self) -> list[Tensor]:
        """All that is kept."""
        return [one for full in self._kept.values() for one in full.tensors]

    @torch.no_grad()
    def _start(self) -> None:
        """Begin to refresh all that the turn will ask for."""
        self._started = True
        if self._planned[0] is not self._order:
            gathers = [one for one in self._order if one.parts is not None]
            if self._blocks is None:
                made = in_buckets(gathers, bucket_size(sum(one.num_bytes for one in gathers), FULL))
            else:
                made = self._blocks.split(gathers)
            self._planned = self._order, [(Together(some), self._laid_out(some)) for some in made]
        for bucket, kept in self._planned[1]:
            # what autograd knows of the tensors is no business of what fills them
            coming = bucket.start([one.tensors[0].data for one in kept])
            for full, gather in zip(kept, bucket.gathers, strict=True):
                full.coming, full.turn, full.shards = coming, self._turn, (gather.stored,)

    def _key(self, gather: Gather) -> Key:
        return gather.name, self._numbers.of(gather.transfers)

    def _laid_out(self, gathers: Sequence[Gather]) -> list[_Full]:
        """What is kept for the weights of a bucket."""
        if new := [one for one in gathers if self._key(one) not in self._kept]:
            self._lay_out(new)
        return [self._kept[self._key(one)] for one in gathers]

    def _lay_out(self, gathers: Sequence[Gather]) -> None:
        """Make memory for full weights, with their shards in it."""
        transport, (group, dtype) = gathers[0].transport, gathers[0].key
        lengths = [prod(one.shape) for one in gathers]
        if sum(lengths) * dtype.itemsize >= LARGE:
            lengths = [aligned(length, dtype) for length in lengths]
        flat = transport.buffer(sum(lengths), dtype, group)
        for gather, memory in zip(gathers, flat.split(lengths), strict=True):
            full = memory[: prod(gather.shape)].view(gather.shape)
            self._kept[self._key(gather)] = _Full([full], (gather.stored,))
            assert gather.parts is not None
            part = gather.parts[group.index(transport.rank)]
            view = None if part is None else narrowed(full, part)
            if view is not None and view.is_contiguous() and view.shape == gather.stored.shape:
                gather.stored.data = view.copy_(gather.stored)
                vars(gather.stored)[LIES] = place_of(view)
            else:
                transport.lay([gather.stored], group)


def place_of(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies: in which storage, and where in it. The storage itself may move."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other

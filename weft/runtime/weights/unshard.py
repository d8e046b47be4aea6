"""Unsharding: how a parameter that is stored in shards is brought to where it is used.

In: the rank's shard and the transfers that bring it. Out: the full weight, or several begun in one all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from weft.runtime.layout.execute import execute_all
from weft.runtime.layout.index import covers
from weft.runtime.layout.sharding import Sharding
from weft.runtime.layout.transfer import Index, Transfer
from weft.runtime.links.transport import Doing, Group, Handle, Transport, listed
from weft.runtime.weights.buckets import by_key


@dataclass(frozen=True, eq=False)
class Gather:
    """One parameter's way to where it is used."""

    name: str
    stored: Tensor
    transfers: tuple[Transfer, ...]
    transport: Transport
    known: dict[tuple[Gather, ...], list[Together]] = field(default_factory=dict)
    """What comes together with it (`batches`)."""
    _alias: Tensor | None = None

    @cached_property
    def key(self) -> tuple[Group, torch.dtype]:
        """What all of a bucket have in common."""
        return self.transfers[0].group, self.stored.dtype

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.transfers[-1].shapes[0]

    @cached_property
    def num_bytes(self) -> int:
        """Of what it brings."""
        return sum(map(prod, self.transfers[-1].shapes)) * self.stored.itemsize

    @cached_property
    def parts(self) -> tuple[Index | None, ...] | None:
        """What each member of the group has of it; None if it is not put together from one shard of each."""
        if len(self.transfers) != 1:
            return None
        (transfer,) = self.transfers
        found = {piece.peer: piece.index for piece in transfer.receives}
        plain = transfer.kind == "all_gather" and not transfer.add and len(transfer.shapes) == 1
        if not plain or len(found) != len(transfer.receives):
            return None
        whole = all(covers(piece.index, tuple(self.stored.shape)) for piece in transfer.sends)
        return tuple(found.get(peer) for peer in transfer.group) if whole else None

    @torch.no_grad()
    def now(self) -> Tensor:
        """The full weight, by all its transfers."""
        self.transport.doing = Doing(f"use of {self.name}")
        return execute_all(self.transfers, [self.stored.detach()], self.transport, dtype=self.stored.dtype)[0]

    def shard(self) -> Tensor:
        """The rank's shard as an ordinary flat tensor, of one version with the parameter."""
        found, stored = self._alias, self.stored
        if found is None or found.data_ptr() != stored.data_ptr():
            found = stored.detach()
            # another memory could not follow
            found = vars(self)["_alias"] = found.view(-1) if found.is_contiguous() else found
        return found if found.dim() == 1 else found.reshape(-1)

    @property
    def version(self) -> int:
        """Another one when the parameter was written to."""
        # who asks a parameter itself may be asked back what for (`shard_tensor.py`)
        return (self.stored if self._alias is None else self._alias)._version


class Together:
    """Weights of one group and dtype, which all have shards, that come in one call."""

    def __init__(self, gathers: Sequence[Gather]) -> None:
        self.gathers, first = tuple(gathers), gathers[0]
        parts = [one.parts for one in gathers if one.parts is not None]
        shapes, mine = [one.shape for one in gathers], [tuple(one.stored.shape) for one in gathers]
        self._sharding = Sharding(shapes, parts, mine, first.stored.dtype)
        self._transport, self._group = first.transport, first.key[0]
        self._doing = Doing(f"use of {listed([one.name for one in gathers])}")

    @torch.no_grad()
    def start(self, full: Sequence[Tensor] | None = None) -> Handle[list[Tensor]]:
        """Begin to gather them; `full`: where to."""
        # nothing here is the model's: whoever watches its operators need not see it
        with torch._C.DisableTorchFunction():
            transport = self._transport
            before, transport.doing = transport.doing, self._doing
            handle = transport.start_all_gather(
                [one.shard() for one in self.gathers], self._sharding, self._group, full
            )
            transport.doing = before
        return handle


def batches(gathers: Sequence[Gather]) -> list[Together]:
    """Weights that all have shards, by group and dtype. The same ones are asked for in every step."""
    known, key = gathers[0].known, tuple(gathers)
    if key not in known:
        known[key] = list(map(Together, by_key(gathers)))
    return known[key]

"""Unsharding: how a parameter that is stored in shards is brought to where it is used.

In: the rank's shard and the transfers that bring it. Out: the full weight, or several begun in one all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from weft.runtime.layout.execute import execute_all
from weft.runtime.layout.index import covers
from weft.runtime.layout.transfer import Index, Transfer
from weft.runtime.links.transport import Doing, Group, Handle, Sharded, Then, Transport, listed


@dataclass(frozen=True, eq=False)
class Gather:
    """One parameter's way to where it is used.

    Args:
        number: of the transfers (`intern.py`).
    """

    name: str
    stored: Tensor
    transfers: tuple[Transfer, ...]
    transport: Transport
    number: int

    @cached_property
    def use(self) -> tuple[str, int]:
        """What tells the gathers of one module apart."""
        return self.name, self.number

    @cached_property
    def key(self) -> tuple[Group, torch.dtype]:
        """What all of a bucket have in common."""
        return self.transfers[0].group, self.stored.dtype

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

    def sharded(self, full: Tensor) -> Sharded:
        """The same as a collective sees it; `full`: where it is put together."""
        assert self.parts is not None
        # of its own: what autograd knows of the tensors is no business of what fills them
        return Sharded(full.data, self.stored.data, self.parts)


@torch.no_grad()
def start_gathers(gathers: Sequence[Gather], full: Sequence[Tensor] | None = None) -> Handle[list[Tensor]]:
    """Begin to gather weights of one group and dtype, which all have shards; `full`: where to."""
    # nothing here is the model's: whoever watches its operators need not see it
    with torch._C.DisableTorchFunction():
        transport, group = gathers[0].transport, gathers[0].key[0]
        if full is None:
            full = [transport.empty(prod(one.shape), one.stored.dtype, brief=True).view(one.shape) for one in gathers]
        before, transport.doing = transport.doing, Doing(f"use of {listed([one.name for one in gathers])}")
        made = list(full)
        handle = transport.start_all_gather([one.sharded(to) for one, to in zip(gathers, full, strict=True)], group)
        transport.doing = before
    return Then(handle, lambda _: made)

"""FakeTransport: a transport that sends nothing and gives tensors of the right shapes, of no particular content.

In: a rank that runs on fake tensors. Out: what collectives would give it, as shapes; and how large the messages were
that it would have sent. Other ranks are taken to be like this one where only they know a shape, and to be processes of
one host: sums of gradients lie in memory that is lent once and then kept (`shm/pool.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.runtime.layout.sharding import Sharding
from weft.runtime.links.inbox import OwnPosts
from weft.runtime.links.transport import Doing, Done, Expected, Expects, Group, Handle, Sends, Transport
from weft.runtime.links.wire import LARGE
from weft.runtime.shm.mailbox import SMALL
from weft.runtime.shm.segments import ALIGNED, BEGIN, PIECE

FEW = 64
"""Elements of a tensor whose content decides what comes next: the sizes that others have."""


class FakeTransport(Transport):
    """One rank, and nobody there.

    Args:
        by_block: as transports of devices have it.
    """

    def __init__(
        self, rank: int, num_ranks: int, device: torch.device | None = None, *, by_block: bool = False
    ) -> None:
        self.rank, self.num_ranks, self.by_block = rank, num_ranks, by_block
        self.device, self.doing = device or torch.device("cpu"), Doing()
        self._largest: dict[tuple[int, ...], int] = {}
        """Bytes of the largest message in each group that does not go through a pipe."""
        self._own_posts = OwnPosts()
        self._staged: dict[str, int] = {}
        self._seen: set[int] = set()
        """Memory that others see."""
        self._lent: list[Tensor] = []
        self._free: list[Tensor] = []

    def lend(self, sizes: Iterable[int]) -> None:
        """Have memory for sums of these bytes, as after the first step."""
        boxes = [_aligned(size) for size in sizes if size >= LARGE]
        self._lent = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in boxes]
        self._free = sorted(self._lent, key=Tensor.numel)

    def memory(self) -> list[Tensor]:
        """What is lent; gradients lie in it."""
        return list(self._lent)

    def start_all_reduce(self, parts: Sequence[Tensor], group: Group) -> Handle[Tensor]:
        own = {one.untyped_storage()._cdata for one in self._lent}
        if len(parts) == 1 and parts[0].untyped_storage()._cdata in own:
            return Done(parts[0])
        flat = self.buffer(sum(part.numel() for part in parts), parts[0].dtype, group)
        torch.cat([part.detach().reshape(-1) for part in parts], out=flat)
        return Done(flat)

    def buffer(self, numel: int, dtype: torch.dtype, group: Group, *, brief: bool = False) -> Tensor:
        num_bytes = numel * dtype.itemsize
        lent = next((one for one in self._free if one.numel() >= num_bytes >= LARGE), None)
        if num_bytes < LARGE or brief:
            return torch.empty(numel, dtype=dtype, device=self.device)
        if lent is None:
            return self._page_aligned(num_bytes).view(dtype)
        self._free = [one for one in self._free if one is not lent]
        return lent[:num_bytes].view(dtype)

    def lay(self, tensors: Sequence[Tensor], group: Group) -> None:
        lengths = [-(-one.nbytes // BEGIN) * BEGIN for one in tensors]
        if sum(one.nbytes for one in tensors) >= LARGE:
            for one, part in zip(tensors, self._page_aligned(sum(lengths)).split(lengths), strict=True):
                one.data = part[: one.nbytes].view(one.dtype).view(one.shape)

    def _page_aligned(self, num_bytes: int) -> Tensor:
        made = torch.empty(_aligned(num_bytes), dtype=torch.uint8, device=self.device)
        self._seen.add(made.untyped_storage()._cdata)
        return made[:num_bytes]

    def start_all_gather(
        self, shards: Sequence[Tensor], sharding: Sharding, group: Group, full: Sequence[Tensor] | None = None
    ) -> Handle[list[Tensor]]:
        if self._shared("all_gather", sharding, shards):
            return Done(self.wholes(sharding) if full is None else list(full))
        return super().start_all_gather(shards, sharding, group, full)

    def start_reduce_scatter(self, full: Sequence[Tensor], sharding: Sharding, group: Group) -> Handle[list[Tensor]]:
        if self._shared("reduce_scatter", sharding, full):
            return Done(self.shards(sharding))
        return super().start_reduce_scatter(full, sharding, group)

    def _shared(self, kind: str, sharding: Sharding, sent: Sequence[Tensor]) -> bool:
        """True if others read what is sent where it lies, or where it was copied to."""
        if sharding.nbytes < LARGE:
            return False
        staged = sum(one.nbytes for one in sent if one.untyped_storage()._cdata not in self._seen)
        if staged:
            self._staged[kind] = max(self._staged.get(kind, 0), _aligned(max(staged, LARGE)))
        return True

    def all_reduce(self, tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
        self._note(group, tensor.nbytes)
        return _like(tensor)

    def all_gather(self, tensor: Tensor, group: Group, *, copies: bool = True, **how: Any) -> list[Tensor]:
        if not copies:
            return super().all_gather(tensor, group, copies=False, **how)
        if tensor.numel() <= FEW:
            return [tensor for _ in group]
        self._note(group, tensor.nbytes)
        # bytes are text that is read
        return [tensor.clone() if tensor.dtype == torch.uint8 else _like(tensor) for _ in group]

    def all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> dict[int, list[Tensor]]:
        self._note(group, sum(tensor.nbytes for peer, each in sends.items() if peer != self.rank for tensor in each))
        return {peer: self._made(each) for peer, each in expects.items()}

    def barrier(self, group: Group) -> None:
        return None

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        if peer == self.rank:
            self._own_posts.leave(tag, tensors)
        else:
            self._note(tuple(sorted((self.rank, peer))), sum(tensor.nbytes for tensor in tensors), SMALL)

    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        return self._own_posts.fetch(tag) if peer == self.rank else self._made(expects)

    def _made(self, expects: Sequence[Expected]) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in expects]

    def _note(self, group: Group, num_bytes: int, least: int = LARGE) -> None:
        if num_bytes >= least:
            self._largest[group] = max(self._largest.get(group, 0), num_bytes)

    @property
    def num_bytes(self) -> int:
        """A segment for the largest message of each group, or for a piece of it, and what was copied for others."""
        messages = sum(_aligned(min(size, PIECE)) + ALIGNED for size in self._largest.values())
        return messages + sum(self._staged.values())


def _aligned(size: int) -> int:
    """Bytes of the memory that is taken for so many."""
    return -(-size // ALIGNED) * ALIGNED


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)

"""Subgroup: some ranks of a job as if there were no others.

In: a transport and some of its ranks. Out: a transport that shows a rank only these, counted from 0 in the order given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.runtime.layout.sharding import Sharding
from weft.runtime.links.transport import Doing, Expected, Expects, Group, Handle, Sends, Then, Transport


class Subgroup(Transport):
    """The transport of some ranks of another one's; this rank is among them."""

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        self.whole, self.ranks = whole, tuple(ranks)
        self.rank, self.num_ranks, self.device = self.ranks.index(whole.rank), len(self.ranks), whole.device
        self.by_block = whole.by_block

    @property
    def doing(self) -> Doing:
        return self.whole.doing

    @doing.setter
    def doing(self, doing: Doing) -> None:
        self.whole.doing = doing

    def all_reduce(self, tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
        return self.whole.all_reduce(tensor, self.outside(group), op)

    def all_gather(self, tensor: Tensor, group: Group, **how: Any) -> list[Tensor]:
        return self.whole.all_gather(tensor, self.outside(group), **how)

    def all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> dict[int, list[Tensor]]:
        return self._inside(self.whole.all_to_all(*self._mapped(sends, expects), self.outside(group), kind))

    def tell(self, numbers: Sequence[float], group: Group) -> list[tuple[float, ...]]:
        return self.whole.tell(numbers, self.outside(group))

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        self.whole.post(self.ranks[peer], tag, tensors)

    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        return self.whole.take(self.ranks[peer], tag, expects)

    def open(self, groups: Collection[Group]) -> None:
        self.whole.open([self.outside(group) for group in groups])

    def open_mail(self) -> None:
        self.whole.open_mail()

    def meet(self, pairs: Collection[tuple[int, int]]) -> None:
        self.whole.meet([(self.ranks[sender], self.ranks[taker]) for sender, taker in pairs])

    def start_all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> Handle[dict[int, list[Tensor]]]:
        arriving = self.whole.start_all_to_all(*self._mapped(sends, expects), self.outside(group), kind)
        return Then(arriving, self._inside)

    def start_all_reduce(self, parts: Sequence[Tensor], group: Group) -> Handle[Tensor]:
        return self.whole.start_all_reduce(parts, self.outside(group))

    def start_all_gather(
        self, shards: Sequence[Tensor], sharding: Sharding, group: Group, full: Sequence[Tensor] | None = None
    ) -> Handle[list[Tensor]]:
        return self.whole.start_all_gather(shards, sharding, self.outside(group), full)

    def start_reduce_scatter(self, full: Sequence[Tensor], sharding: Sharding, group: Group) -> Handle[list[Tensor]]:
        return self.whole.start_reduce_scatter(full, sharding, self.outside(group))

    def buffer(self, numel: int, dtype: torch.dtype, group: Group, *, brief: bool = False) -> Tensor:
        return self.whole.buffer(numel, dtype, self.outside(group), brief=brief)

    def empty(self, numel: int, dtype: torch.dtype, *, brief: bool = False) -> Tensor:
        return self.whole.empty(numel, dtype, brief=brief)

    def lay(self, tensors: Sequence[Tensor], group: Group) -> None:
        self.whole.lay(tensors, self.outside(group))

    @property
    def job(self) -> Transport:
        return self.whole.job

    @property
    def num_replicas(self) -> int:
        return self.whole.num_replicas

    @property
    def twins(self) -> Group:
        return self.whole.twins

    def everywhere(self, group: Group) -> Group:
        return self.whole.everywhere(self.outside(group))

    def outside(self, group: Group) -> Group:
        """Ranks as they are counted in the whole."""
        return tuple(self.ranks[rank] for rank in group)

    def _mapped(self, sends: Sends, expects: Expects) -> tuple[Sends, Expects]:
        return (
            {self.ranks[peer]: tensors for peer, tensors in sends.items()},
            {self.ranks[peer]: shapes for peer, shapes in expects.items()},
        )

    def _inside(self, came: Mapping[int, list[Tensor]]) -> dict[int, list[Tensor]]:
        """What came, by ranks as they are counted here."""
        return {self.ranks.index(peer): tensors for peer, tensors in came.items()}

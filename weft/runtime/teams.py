"""Teams: a program for n ranks on n given ranks of a larger job, in every replica of it.

In: the transport of a replica and the ranks of a team, ascending or not. Out: a transport that shows a rank only its
team, ranks 0 .. n - 1 in the order given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from weft.runtime.replicas import Replica
from weft.runtime.transport import Doing, Expected, Transport


class Team:
    """The transport of one team; this rank is in it."""

    def __init__(self, whole: Replica, ranks: Sequence[int]) -> None:
        self.whole, self.ranks = whole, tuple(ranks)
        self.rank, self.num_ranks, self.device = self.ranks.index(whole.rank), len(self.ranks), whole.device

    @property
    def doing(self) -> Doing:
        return self.whole.doing

    @doing.setter
    def doing(self, doing: Doing) -> None:
        self.whole.doing = doing

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...], op: str = "sum") -> Tensor:
        return self.whole.all_reduce(tensor, self.outside(group), op)

    def all_gather(self, tensor: Tensor, group: tuple[int, ...]) -> list[Tensor]:
        return self.whole.all_gather(tensor, self.outside(group))

    def all_to_all(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        expects: Mapping[int, Sequence[Expected]],
        group: tuple[int, ...],
        kind: str = "all_to_all",
    ) -> dict[int, list[Tensor]]:
        arrived = self.whole.all_to_all(
            {self.ranks[peer]: tensors for peer, tensors in sends.items()},
            {self.ranks[peer]: shapes for peer, shapes in expects.items()},
            self.outside(group),
            kind,
        )
        return {self.ranks.index(peer): tensors for peer, tensors in arrived.items()}

    def barrier(self, group: tuple[int, ...]) -> None:
        self.whole.barrier(self.outside(group))

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        self.whole.post(self.ranks[peer], tag, tensors)

    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        return self.whole.take(self.ranks[peer], tag, expects)

    @property
    def job(self) -> Transport:
        """The transport of all ranks."""
        return self.whole.whole

    @property
    def num_replicas(self) -> int:
        return self.whole.num_replicas

    @property
    def twins(self) -> tuple[int, ...]:
        """The ranks of the job that hold what this one holds, one per replica."""
        return self.whole.twins

    def everywhere(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of a group in all replicas, as ranks of the job."""
        return self.whole.everywhere(self.outside(group))

    def outside(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks of the team as ranks of the replica."""
        return tuple(self.ranks[rank] for rank in group)

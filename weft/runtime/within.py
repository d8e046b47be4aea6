"""Within: some ranks of a job as if there were no others.

In: a transport and some of its ranks. Out: a transport that shows a rank only these, counted from 0 in the order given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.runtime.transfers import Arriving, Exchanges
from weft.runtime.transport import Doing, Expected, Transport


@dataclass(frozen=True)
class _Mapped:
    """What arrives, by ranks as they are counted inside."""

    arriving: Arriving
    ranks: tuple[int, ...]

    def wait(self) -> dict[int, list[Tensor]]:
        return {self.ranks.index(peer): tensors for peer, tensors in self.arriving.wait().items()}


class Within:
    """The transport of some ranks of another one's; this rank is among them."""

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
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

    def start_exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        expects: Mapping[int, Sequence[Expected]],
        group: tuple[int, ...],
        kind: str,
    ) -> Arriving | None:
        """Begin an `all_to_all`; None if the whole cannot."""
        if not isinstance(self.whole, Exchanges):
            return None
        arriving = self.whole.start_exchange(
            {self.ranks[peer]: tensors for peer, tensors in sends.items()},
            {self.ranks[peer]: shapes for peer, shapes in expects.items()},
            self.outside(group),
            kind,
        )
        return None if arriving is None else _Mapped(arriving, self.ranks)

    def barrier(self, group: tuple[int, ...]) -> None:
        self.whole.barrier(self.outside(group))

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        self.whole.post(self.ranks[peer], tag, tensors)

    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        return self.whole.take(self.ranks[peer], tag, expects)

    def outside(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks as they are counted in the whole."""
        return tuple(self.ranks[rank] for rank in group)

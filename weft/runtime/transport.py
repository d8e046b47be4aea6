"""Transport: how ranks talk. The interface, its errors, and the view of one group.

A collective call is identified by its group and its number among the calls that this rank has made in that group.
Every member must make the same call: another kind, operation, shape or dtype is an error that names both sides, never
a wrong number or a hang. Results are private: no tensor that enters or leaves a call shares memory with another rank.
`all_to_all` carries every Transfer that is not an all_reduce; `kind` says what shape it has (all_gather,
reduce_scatter, all_to_all, exchange), so that a backend may carry it by the collective that it does best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Expected = tuple[tuple[int, ...], torch.dtype | None]
"""Shape and dtype of a tensor to come; dtype None: whatever the sender has."""


@dataclass(frozen=True)
class Doing:
    """What a rank is busy with, for messages: an op or a reshard, and the user's source line."""

    what: str = ""
    place: str = ""

    def __str__(self) -> str:
        text = f"in {self.what}" if self.what else "outside any op"
        return f"{text} at {self.place}" if self.place else text


def listed(names: Sequence[str]) -> str:
    """Names in few words: the first, and how many more."""
    others = len(names) - 1
    return f"{names[0]} and {others} more" if others else names[0]


class RankFailed(RuntimeError):  # noqa: N818 - says what happened
    """A rank raised; the others were stopped. The original exception is `__cause__`."""

    def __init__(self, rank: int, doing: Doing, cause: BaseException) -> None:
        self.rank, self.op, self.place = rank, doing.what, doing.place
        super().__init__(f"rank {rank} failed {doing}: {type(cause).__name__}: {cause}")
        self.__cause__ = cause


class CollectiveMismatch(RuntimeError):  # noqa: N818 - says what happened
    """Ranks entered collectives that do not fit together, or wait for ones that nobody will enter.

    `waits` tells for every rank what it was doing."""

    def __init__(self, message: str, *, rank: int, waits: Mapping[int, str]) -> None:
        self.rank, self.waits = rank, dict(waits)
        super().__init__("\n".join([message, *(f"  rank {who} {what}" for who, what in sorted(self.waits.items()))]))


class Stopped(BaseException):
    """Raised inside a rank because another one failed. Never leaves the runtime.

    Not an `Exception`, so that no handler in a user's operator swallows it."""


class Transport(Protocol):
    """One rank's way to the others. `group` lists ranks; all members pass the same tuple."""

    rank: int
    num_ranks: int
    device: torch.device
    """Where the rank's tensors live."""
    doing: Doing
    """Kept up to date by the interpreter; read when something goes wrong."""

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...], op: str = "sum") -> Tensor:
        """Sum (or max, min, prod) over the group, added in the order of `group`: equal bit for bit on all members."""
        ...

    def all_gather(self, tensor: Tensor, group: tuple[int, ...]) -> list[Tensor]:
        """The members' tensors in the order of `group`. All have one shape and dtype."""
        ...

    def all_to_all(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        expects: Mapping[int, Sequence[Expected]],
        group: tuple[int, ...],
        kind: str = "all_to_all",
    ) -> dict[int, list[Tensor]]:
        """Send tensors to peers and receive theirs. Members without pieces take part too."""
        ...

    def barrier(self, group: tuple[int, ...]) -> None:
        """Wait until every member has come here."""
        ...

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        """Send tensors to one rank, itself perhaps, under a tag of its own; does not wait for it to take them."""
        ...

    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        """What a rank posts under a tag; waits until it has come."""
        ...


class GroupComm:
    """The communicator of some ranks, as algorithms see it (`comm.Comm`): positions instead of ranks."""

    def __init__(self, transport: Transport, ranks: tuple[int, ...]) -> None:
        assert transport.rank in ranks, f"rank {transport.rank} is not in the group {ranks}"
        assert len(set(ranks)) == len(ranks), f"a rank stands twice in the group {ranks}: it cannot talk to itself"
        self._transport, self._ranks = transport, ranks
        self.rank, self.size = ranks.index(transport.rank), len(ranks)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        if self.size == 1:
            return tensor.detach().clone()
        return self._transport.all_reduce(tensor, self._ranks, op)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Shapes may differ: sizes are exchanged first, so that the transport knows what to expect."""
        if self.size == 1:
            return [tensor.detach().clone()]
        sizes = torch.tensor(tensor.shape, dtype=torch.int64, device=tensor.device)
        shapes = [tuple(map(int, found.tolist())) for found in self._transport.all_gather(sizes, self._ranks)]
        if len(set(shapes)) == 1:
            return self._transport.all_gather(tensor, self._ranks)
        others = [rank for rank in self._ranks if rank != self._transport.rank]
        expects = {
            rank: [(shape, tensor.dtype)] for rank, shape in zip(self._ranks, shapes, strict=True) if rank in others
        }
        arrived = self._transport.all_to_all({rank: [tensor] for rank in others}, expects, self._ranks, "all_gather")
        own = [tensor.detach().clone()]
        return [arrived.get(rank, own)[0] for rank in self._ranks]

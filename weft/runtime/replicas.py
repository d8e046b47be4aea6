"""Replicas: a program for n ranks on k * n of them.

In: the transport of all ranks and n. Out: a transport that shows a rank only its own replica, ranks 0 .. n - 1; and the
ranks that hold the same parts in all replicas, over which gradients are averaged. Rank r stands in replica r // n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from weft.runtime.processes import ProcessTransport
from weft.runtime.transport import Doing, Expected, Transport


class Replica:
    """The transport of one replica: `Transport`, with ranks counted from its first."""

    def __init__(self, transport: Transport, size: int) -> None:
        assert transport.num_ranks % size == 0, f"{transport.num_ranks} ranks are no multiple of {size}"
        self.whole = transport
        self.number, self.num_replicas = transport.rank // size, transport.num_ranks // size
        self.rank, self.num_ranks = transport.rank % size, size
        self.device = transport.device
        self._first = self.number * size
        self._checked: set[str] = set()

    @property
    def doing(self) -> Doing:
        return self.whole.doing

    @doing.setter
    def doing(self, doing: Doing) -> None:
        self.whole.doing = doing

    @property
    def job(self) -> Transport:
        """The transport of all ranks."""
        return self.whole

    @property
    def twins(self) -> tuple[int, ...]:
        """The ranks of the job that hold what this one holds, one per replica."""
        return tuple(range(self.rank, self.whole.num_ranks, self.num_ranks))

    def everywhere(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of a group in all replicas, as ranks of the job."""
        return tuple(number * self.num_ranks + rank for number in range(self.num_replicas) for rank in group)

    def begin_step(self, step: int, program: str = "") -> bool:
        """From now on messages name this step. All ranks of the job say so at the same place.

        The first step of a program is one in which processes make sure, before every collective, that they mean the
        same; later steps of it repeat what was checked. `program` is the same text on all ranks, so all switch
        together.

        Returns:
            whether this is such a step.
        """
        if not isinstance(self.whole, ProcessTransport):
            return False
        self.whole.begin_step(step)
        self.whole.check = self.whole.always_check or program not in self._checked
        self._checked.add(program)
        return self.whole.check

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...], op: str = "sum") -> Tensor:
        return self.whole.all_reduce(tensor, self._ranks(group), op)

    def all_gather(self, tensor: Tensor, group: tuple[int, ...]) -> list[Tensor]:
        return self.whole.all_gather(tensor, self._ranks(group))

    def all_to_all(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        expects: Mapping[int, Sequence[Expected]],
        group: tuple[int, ...],
        kind: str = "all_to_all",
    ) -> dict[int, list[Tensor]]:
        arrived = self.whole.all_to_all(
            {self._first + peer: tensors for peer, tensors in sends.items()},
            {self._first + peer: shapes for peer, shapes in expects.items()},
            self._ranks(group),
            kind,
        )
        return {peer - self._first: tensors for peer, tensors in arrived.items()}

    def barrier(self, group: tuple[int, ...]) -> None:
        self.whole.barrier(self._ranks(group))

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        self.whole.post(self._first + peer, tag, tensors)

    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        return self.whole.take(self._first + peer, tag, expects)

    def _ranks(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._first + rank for rank in group)

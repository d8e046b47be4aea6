"""Replicas: a program for n ranks on k * n of them.

In: the transport of all ranks and n. Out: a transport that shows a rank only its own replica, ranks 0 .. n - 1; and the
ranks that hold the same parts in all replicas, over which gradients are averaged. Rank r stands in replica r // n.
"""

from __future__ import annotations

from weft.runtime.links.subgroup import Subgroup
from weft.runtime.links.transport import Doing, Group, Transport


class Replica(Subgroup):
    """The transport of one replica, with ranks counted from its first."""

    def __init__(self, transport: Transport, size: int) -> None:
        assert transport.num_ranks % size == 0, f"{transport.num_ranks} ranks are no multiple of {size}"
        self.number = transport.rank // size
        super().__init__(transport, range(self.number * size, (self.number + 1) * size))
        self._checked: set[str] = set()

    @property
    def num_replicas(self) -> int:
        return self.whole.num_ranks // self.num_ranks

    @property
    def twins(self) -> Group:
        return tuple(range(self.rank, self.whole.num_ranks, self.num_ranks))

    def everywhere(self, group: Group) -> Group:
        return tuple(number * self.num_ranks + rank for number in range(self.num_replicas) for rank in group)

    def begin_program(self, step: int, program: str) -> bool:
        """A step begins, of a program. All ranks of the job say so at the same place.

        The first step of a program is one in which processes make sure, before every collective, that they mean the
        same; later steps of it repeat what was checked. `program` is the same text on all ranks, so all switch
        together.

        Returns:
            whether this is such a step.
        """
        self.doing = Doing(f"the beginning of {program}")
        found = self.whole.begin_step(step, check=program not in self._checked)
        self._checked.add(program)
        return found

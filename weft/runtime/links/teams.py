"""Teams: a program for n ranks on n given ranks of a larger job, in every replica of it.

In: the transport of a replica and the ranks of a team, ascending or not. Out: a transport that shows a rank only its
team, ranks 0 .. n - 1 in the order given.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.runtime.links.replicas import Replica
from weft.runtime.links.subgroup import Subgroup
from weft.runtime.links.transport import Group


class Team(Subgroup):
    """The transport of one team; this rank is in it."""

    whole: Replica

    def __init__(self, whole: Replica, ranks: Sequence[int]) -> None:
        super().__init__(whole, ranks)

    @property
    def num_replicas(self) -> int:
        return self.whole.num_replicas

    @property
    def twins(self) -> Group:
        return self.whole.twins

    def everywhere(self, group: Group) -> Group:
        return self.whole.everywhere(self.outside(group))

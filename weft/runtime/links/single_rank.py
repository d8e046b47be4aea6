"""SingleRank: the Transport of a job of one rank. Every collective is with itself; results are private."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.runtime.links.inbox import OwnPosts
from weft.runtime.links.transport import Doing, Expected, Expects, Group, Sends, Transport, copied


class SingleRank(Transport):
    """One rank and nobody else."""

    rank, num_ranks = 0, 1

    def __init__(self, device: torch.device | None = None) -> None:
        self.device, self.doing = device or torch.device("cpu"), Doing()
        self._own_posts = OwnPosts()

    def all_reduce(self, tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
        return _copy(tensor, group)

    def all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> dict[int, list[Tensor]]:
        return {peer: [_copy(tensor, (peer,)) for tensor in sends.get(peer, ())] for peer in expects}

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        self._own_posts.leave(tag, tensors)

    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        return self._own_posts.fetch(tag)


def _copy(tensor: Tensor, group: Group) -> Tensor:
    assert tuple(group) == (0,), f"the group {group} names ranks that do not exist"
    return copied(tensor)

"""SingleRank: the Transport of a job of one rank. Every collective is with itself; results are private."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.runtime.links.inbox import Inbox
from weft.runtime.links.transport import Doing, Expected, Expects, Group, Sends, Transport


class SingleRank(Transport):
    """One rank and nobody else."""

    rank, num_ranks = 0, 1

    def __init__(self, device: torch.device | None = None) -> None:
        self.device, self.doing = device or torch.device("cpu"), Doing()
        self._inbox = Inbox[list[Tensor]]()

    def all_reduce(self, tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
        return _copy(tensor, group)

    def all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> dict[int, list[Tensor]]:
        return {peer: [_copy(tensor, (peer,)) for tensor in sends.get(peer, ())] for peer in expects}

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        self._inbox.put(peer, tag, [_copy(tensor, (peer,)) for tensor in tensors])

    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        assert self._inbox.has(peer, tag), f"{tag} is waited for and nobody else is there to send it"
        return self._inbox.pop(peer, tag)


def _copy(tensor: Tensor, group: Group) -> Tensor:
    assert tuple(group) == (0,), f"the group {group} names ranks that do not exist"
    return tensor.detach().clone(memory_format=torch.contiguous_format)

"""Agreement: do the ranks of a replica see the same batch?

In: a rank's batch, as flat tensors. Out: nothing, or who differs. Each rank takes its part of the whole batch by
itself: with different batches the parts would not fit together, and no shape would tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.runtime.links.transport import Transport

PRIME = 65521
"""Bytes that are looked at together: coprime to every usual size, so that equal rows stand at different places."""


@torch.no_grad()
def other_batch(inputs: Sequence[Tensor], transport: Transport) -> int | None:
    """A rank whose batch is another than this one's, if there is one. All ranks call this together."""
    mine = torch.tensor([len(inputs), batch_number(inputs)], dtype=torch.int64, device=transport.device)
    return other_than(mine, transport)


def batch_number(inputs: Sequence[Tensor]) -> int:
    """A number for what a batch contains."""
    return sum(map(checksum, inputs)) & 0x7FFF_FFFF_FFFF


def other_than(mine: Tensor, transport: Transport) -> int | None:
    """A rank that has something else, if there is one. All ranks call this together, with tensors of one shape."""
    found = transport.all_gather(mine, tuple(range(transport.num_ranks)))
    return next((rank for rank, theirs in enumerate(found) if not torch.equal(theirs, mine)), None)


def checksum(tensor: Tensor) -> int:
    """A number that depends on every byte, and on where it stands.

    >>> checksum(torch.tensor([1, 2])) == checksum(torch.tensor([2, 1]))
    False
    """
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    places = torch.arange(1, min(content.numel(), PRIME) + 1, dtype=torch.int32)
    # piece by piece: a batch of images need not be held again at four times its size
    pieces = enumerate(content.split(PRIME))
    return sum((number + 1) * int((piece * places[: piece.numel()]).sum()) for number, piece in pieces)

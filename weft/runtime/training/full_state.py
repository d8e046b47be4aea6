"""Full state: the original's state dict, put together from what the ranks of a replica hold.

In: what holds a rank's parameters and buffers. Out: whole tensors under the original names, in the original's order, on
the CPU: on every rank, or on rank 0 of the job alone. All ranks call this at the same place; one tensor travels at a
time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.runtime.training.pieces import Pieces
from weft.runtime.training.shard_owners import exchange, gather, spread


def full_state(held: Pieces[Any], *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The state dict of the original. A tensor with several names is one tensor.

    Args:
        rank0_only: the other ranks of the job get nothing.
    """
    found: dict[str, Tensor] = {}
    transport = held.transport
    if rank0_only and transport.number:
        # another replica has it
        return found
    owners = exchange(held)
    for name, part in held.stored_parts().items():
        if part.persistent:
            whole = gather(transport, held.part(name), owners.holders(name), part.shape, part.dtype)
            if not rank0_only:
                whole = spread(transport, whole, part.shape, part.dtype)
            if whole is not None:
                found.update(dict.fromkeys((name, *part.tied), whole))
    return {name: found[name] for name in sorted(found, key=lambda name: held.order.get(name, len(held.order)))}

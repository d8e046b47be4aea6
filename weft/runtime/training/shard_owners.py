"""Shard owners: which rank of a replica stores what, and how whole tensors come together on rank 0.

In: a rank's program. Out: for every rank, the intervals that it holds of each parameter and buffer, told once to all;
from that, which elements a rank answers for (each element of the original has one such rank, however often it is
stored), and whole tensors on rank 0, one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.runtime.layout.execute import put, size
from weft.runtime.layout.indices import indices
from weft.runtime.layout.transfer import Index
from weft.runtime.links.transport import GroupComm, Transport
from weft.runtime.program.load import tupled
from weft.runtime.program.stored import Holds


@dataclass(frozen=True)
class ShardOwners:
    """What each rank of the replica holds, by name."""

    ranks: tuple[dict[str, Index], ...]

    def holders(self, name: str) -> list[tuple[int, Index]]:
        """Ranks that hold elements of a tensor which no lower rank holds in the very same way."""
        found: dict[Index, int] = {}
        for rank, held in enumerate(self.ranks):
            if name in held and all(size(held[name])):
                found.setdefault(held[name], rank)
        return [(rank, index) for index, rank in found.items()]

    def answers_for(self, name: str, rank: int) -> Tensor | bool:
        """Which elements of a rank's part no lower rank holds: all of them, none, or those where the mask is true."""
        mine = self.ranks[rank][name]
        lower = [index for other, index in self.holders(name) if other < rank and _meet(index, mine)]
        if not lower or mine in lower:
            return not lower
        covered = torch.zeros(size(mine), dtype=torch.bool)
        for index in lower:
            inside = torch.ones((), dtype=torch.bool)
            for own, others in zip(mine, index, strict=True):
                inside = inside.unsqueeze(-1) & torch.isin(indices(own), indices(others))
            covered |= inside
        return ~covered


def exchange(program: Holds) -> ShardOwners:
    """Ask every rank of the replica. All of them call this at the same place."""
    mine = {name: program.stored[name] for name in program.stored_parts() if name in program.stored}
    told = tell_all(program.transport, mine)
    return ShardOwners(tuple({name: tupled(index) for name, index in one.items()} for one in told))


def tell_all(transport: Transport, value: Any) -> list[Any]:
    """Plain values of all ranks, in rank order."""
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=transport.device)
    everybody = GroupComm(transport, tuple(range(transport.num_ranks)))
    return [json.loads(bytes(one.tolist())) for one in everybody.all_gather(text)]


def gather(
    transport: Transport,
    part: Tensor | None,
    holders: Sequence[tuple[int, Index]],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor | None:
    """A whole tensor, on rank 0; None on the others.

    Args:
        part: what this rank holds.
        holders: which ranks give what.
    """
    gives = part is not None and any(rank == transport.rank for rank, _ in holders)
    sends = {0: [part.detach().to(transport.device).contiguous()]} if gives and part is not None else {}
    own = sends.pop(0) if transport.rank == 0 and sends else []
    expects = {rank: [(size(index), dtype)] for rank, index in holders if rank} if transport.rank == 0 else {}
    arrived = transport.all_to_all(sends, expects, tuple(range(transport.num_ranks)))
    if transport.rank:
        return None
    whole = torch.zeros(tuple(shape), dtype=dtype)
    for rank, index in holders:
        (piece,) = arrived[rank] if rank else own
        put(whole, index, piece.to(whole.device))
    return whole


def spread(transport: Transport, whole: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor that rank 0 has, on every rank."""
    others = range(1, transport.num_ranks)
    sends = {} if whole is None else {rank: [whole.to(transport.device)] for rank in others}
    expects = {0: [(tuple(shape), dtype)]} if transport.rank else {}
    arrived = transport.all_to_all(sends, expects, tuple(range(transport.num_ranks)))
    # what came may lie in memory of the transport's
    return arrived[0][0].cpu().clone() if whole is None else whole


def _meet(one: Index, other: Index) -> bool:
    """True if two boxes have an element in common."""
    return all(
        any(a < d and c < b for a, b in mine for c, d in theirs) for mine, theirs in zip(one, other, strict=True)
    )

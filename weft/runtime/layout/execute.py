"""Transfers: what a rank sends, receives and puts in place.

Enters: a Transfer and the rank's local tensors, one per slot. Leaves: new local tensors, one per slot of
the target. Promised: no autograd (a Reshard brings its own), no collective for kind `local`, results that are
contiguous wherever they were cut or put together (a view in the user's model stays valid), and dtypes that agree on
all members.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from weft.runtime.layout.index import Shape, covers, put, size, take
from weft.runtime.layout.transfer import Piece, Transfer
from weft.runtime.links.transport import Expected, Transport

__all__ = [
    "assembled",
    "covers",
    "execute",
    "execute_all",
    "expected",
    "put",
    "real_dtype",
    "size",
    "take",
    "taken",
    "together",
]


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a new tensor gets when it is asked for with `dtype`: another one under a mode that widens it."""
    return torch.empty(0, dtype=dtype).dtype


@torch.no_grad()
def execute(transfer: Transfer, tensors: Sequence[Tensor], transport: Transport, *, dtype: torch.dtype) -> list[Tensor]:
    """Carry out one Transfer; the result has a tensor per entry of `transfer.shapes`, which may be one of those given.

    Args:
        dtype: of the value, where the rank holds no part of the source.
    """
    if transfer.kind == "all_reduce":
        assert len(tensors) == 1, f"an all_reduce sums one local tensor, not {len(tensors)}"
        return list(tensors) if len(transfer.group) == 1 else [transport.all_reduce(tensors[0], transfer.group)]
    dtype = tensors[0].dtype if tensors else real_dtype(dtype)
    if transfer.even:
        # said apart: how much others have for each other shows in no rank's own pieces
        rows = transport.all_gather(tensors[0], transfer.group, copies=False)
        came = {peer: [row] for peer, row in zip(transfer.group, rows, strict=True)}
        return assembled(transfer, came, dtype, transport.device, kept=tensors)
    sends, expects = taken(transfer, tensors), expected(transfer, dtype)
    own = sends.pop(transport.rank, [])
    expects.pop(transport.rank, None)
    if transfer.kind == "local":
        assert not sends and not expects, f"a local transfer of rank {transport.rank} names other ranks"
        arrived: dict[int, list[Tensor]] = {}
    else:
        arrived = transport.all_to_all(sends, expects, transfer.group, transfer.kind)
    return assembled(transfer, {**arrived, transport.rank: own}, dtype, transport.device, kept=tensors)


@torch.no_grad()
def assembled(
    transfer: Transfer,
    came: Mapping[int, Sequence[Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    kept: Sequence[Tensor] = (),
) -> list[Tensor]:
    """The tensors that a rank gets, one per slot, put together from the pieces of `transfer.receives`.

    Args:
        came: by peer, in order; from the rank itself views of its own.
        kept: tensors that others hold, not to be written to.
    """
    queues = {peer: iter(pieces) for peer, pieces in came.items()}
    received = [(piece, next(queues[piece.peer])) for piece in transfer.receives]
    results = []
    for slot, shape in enumerate(transfer.shapes):
        mine = [pair for pair in received if pair[0].slot == slot]
        if mine:
            results.append(_assemble(mine, shape, add=transfer.add, kept=kept))
        else:
            results.append(torch.zeros(shape, dtype=real_dtype(dtype), device=device))
    return results


def execute_all(
    transfers: Sequence[Transfer], tensors: Sequence[Tensor], transport: Transport, *, dtype: torch.dtype
) -> list[Tensor]:
    """Carry out transfers one after the other, each on the result of the one before."""
    current = list(tensors)
    for transfer in transfers:
        current = execute(transfer, current, transport, dtype=dtype)
    return current


def taken(transfer: Transfer, tensors: Sequence[Tensor], spared: Collection[int] = ()) -> dict[int, list[Tensor]]:
    """By peer, the pieces that go to it; nothing goes to those that are spared."""
    found: dict[int, list[Tensor]] = {}
    for piece in transfer.sends:
        if piece.peer not in spared:
            found.setdefault(piece.peer, []).append(take(tensors[piece.slot], piece.index))
    return found


def expected(transfer: Transfer, dtype: torch.dtype) -> dict[int, list[Expected]]:
    """By peer, shapes and dtype of the pieces that come from it."""
    found: dict[int, list[Expected]] = {}
    for piece in transfer.receives:
        found.setdefault(piece.peer, []).append((size(piece.index), dtype))
    return found


def _assemble(mine: Sequence[tuple[Piece, Tensor]], shape: Shape, *, add: bool, kept: Sequence[Tensor]) -> Tensor:
    """One tensor of that shape from its pieces. `kept`: tensors that others hold, not to be written to."""
    (piece, first), *rest = mine
    if not covers(piece.index, shape):
        found = None if add else _as_it_came(mine, shape, kept)
        if found is not None:
            return found
        out, rest = first.new_zeros(shape), list(mine)
    elif not rest and first.is_contiguous() and (any(first is tensor for tensor in kept) or _owns_memory(first)):
        return first
    else:
        out = first.clone(memory_format=torch.contiguous_format)
    for piece, tensor in rest:
        put(out, piece.index, tensor, add=add)
    return out


def _as_it_came(mine: Sequence[tuple[Piece, Tensor]], shape: Shape, kept: Sequence[Tensor]) -> Tensor | None:
    """The whole in the memory in which its pieces came, if they lie there one after the other as in the whole, with a
    hole for a piece that lies elsewhere; None if they do not."""
    row, at = math.prod(shape[1:]), 0
    memory: Tensor | None = None
    elsewhere = []
    for piece, tensor in sorted(mine, key=lambda one: one[0].index):
        rows = size(piece.index)[0]
        if piece.index[0] != ((at, at + rows),) or not covers(piece.index[1:], shape[1:]):
            return None
        if any(together(one, tensor) for one in kept):
            elsewhere.append((at, tensor))
        elif tensor.storage_offset() == at * row and (memory is None or together(memory, tensor)):
            memory = tensor
        else:
            return None
        at += rows
    if memory is None or at != shape[0] or memory.untyped_storage().nbytes() != math.prod(shape) * memory.itemsize:
        return None
    whole = memory.as_strided(shape, torch.empty(shape, device="meta").stride(), 0)
    for start, tensor in elsewhere:
        whole.narrow(0, start, tensor.shape[0]).copy_(tensor)
    return whole


def together(one: Tensor, other: Tensor) -> bool:
    """True if two tensors lie in one memory."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _owns_memory(tensor: Tensor) -> bool:
    """False for a cut of a larger tensor: it would keep the whole alive, and might not be contiguous."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes

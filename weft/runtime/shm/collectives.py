"""Collectives of the processes of one host: each member reads the others' tensors where they lie.

In: tensors in a SharedPool, as many on each member and in one order. Out: nothing: `all_reduce` leaves the sum in all
of them, `all_gather` fills in full tensors, `reduce_scatter` this member's parts of sums. Members tell each other where
their tensors lie, so each may lay them as it likes, and once more when they have read, so that nobody writes where
another still reads. Sums are added in group order: the bits are those of `sums.py`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from weft.runtime.layout.index import narrowed, size, take
from weft.runtime.layout.sharding import Sharding
from weft.runtime.layout.transfer import Index
from weft.runtime.links.transport import combine, put_shard
from weft.runtime.links.wire import LARGE
from weft.runtime.shm.pool import SharedPool
from weft.runtime.shm.segments import BEGIN, Segment

BLOCK = 1 << 20
"""Bytes that are added up at a time: what was just written is still in the cache when it is read again."""
LET_GO = 8 << 20
"""Bytes from which on memory of others that was looked at is let go: to look again costs a little time."""

Work = Callable[[Sequence[int]], None]
"""What a member does, given the positions of the members in group order."""


@torch.no_grad()
def shared(pool: SharedPool, tensors: Sequence[Tensor], *, brief: bool = True) -> tuple[list[Tensor], list[bytes]]:
    """The tensors, where others see them: as they lie, or copies; and their addresses. `brief`: for a short time."""
    found, addresses = list(tensors), [pool.address(tensor) for tensor in tensors]
    # a tensor without content lies nowhere, and is not read
    anywhere = next(filter(None, addresses), None)
    addresses = [address if one.numel() else anywhere for one, address in zip(tensors, addresses, strict=True)]
    others = [at for at, address in enumerate(addresses) if address is None]
    if others:
        lengths = [-(-found[at].nbytes // BEGIN) * BEGIN for at in others]
        memory = pool.lend(max(sum(lengths), LARGE), brief=brief)
        for at, part in zip(others, memory[: sum(lengths)].split(lengths), strict=True):
            like = found[at]
            addresses[at] = pool.address(part if like.numel() else memory)
            found[at] = part[: like.nbytes].view(like.dtype).view(like.shape).copy_(like)
    return found, [address for address in addresses if address is not None]


def all_reduce(pool: SharedPool, flat: Tensor, address: bytes) -> Work:
    """Each member adds up its own chunk of all tensors, and writes the sum into all of them."""

    @torch.no_grad()
    def work(order: Sequence[int]) -> None:
        theirs, segments = _views(pool, [flat], [address])
        tensors = [flat if at == pool.position else each[0] for at, each in enumerate(theirs)]
        own = [tensor.tensor_split(len(tensors))[pool.position] for tensor in tensors]
        blocks = [chunk.split(BLOCK // flat.itemsize) for chunk in own]
        for parts in zip(*blocks, strict=True):
            total = combine([parts[at] for at in order], "sum", parts[pool.position] if len(parts) == 2 else None)
            for part in parts:
                if part is not total:
                    part.copy_(total)
        _end(pool, segments)

    return work


def all_gather(pool: SharedPool, full: Sequence[Tensor], shards: Sequence[Tensor], sharding: Sharding) -> Work:
    """Each member reads the others' shards to their places."""
    laid, addresses = shared(pool, [one.detach() for one in shards])

    @torch.no_grad()
    def work(order: Sequence[int]) -> None:
        theirs = pool.find(addresses)
        for runs, position in zip(sharding.runs, order, strict=True):
            for at, part, shape in runs:
                if position == pool.position:
                    put_shard(full[at], part, laid[at].view(shape))
                else:
                    _read_shard(full[at], part, *theirs[position][at])
        pool.meet()

    return work


def reduce_scatter(pool: SharedPool, full: Sequence[Tensor], shards: Sequence[Tensor], sharding: Sharding) -> Work:
    """Each member adds up its own part of all."""
    laid, addresses = shared(pool, [one.detach() for one in full])

    @torch.no_grad()
    def work(order: Sequence[int]) -> None:
        theirs, segments = _views(pool, laid, addresses)
        for at, part, _ in sharding.runs[order.index(pool.position)]:
            addends = [laid[at] if position == pool.position else theirs[position][at] for position in order]
            _add([take(addend, part) for addend in addends], shards[at])
        _end(pool, segments)

    return work


SHARDED: Mapping[str, Callable[[SharedPool, Sequence[Tensor], Sequence[Tensor], Sharding], Work]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
}


def _views(
    pool: SharedPool, tensors: Sequence[Tensor], addresses: Sequence[bytes]
) -> tuple[list[list[Tensor]], list[Segment]]:
    """By position, the tensors of the others in the shapes of those here, and the segments that they lie in."""
    found = pool.find(addresses)
    views = [
        [
            segment.memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
            for like, (segment, start) in zip(tensors, each, strict=False)
        ]
        for each in found
    ]
    return views, list({id(segment): segment for each in found for segment, _ in each}.values())


def _end(pool: SharedPool, segments: Sequence[Segment]) -> None:
    """Nobody reads or writes any more in a tensor that another takes for complete."""
    for segment in segments:
        if segment.size >= LET_GO:
            segment.look_away()
    pool.meet()


def _read_shard(full: Tensor, part: Index, segment: Segment, start: int) -> None:
    """Copy a shard of another process to its place."""
    view = narrowed(full, part)
    whole = view is not None and view.is_contiguous()
    # read, not mapped: mapped memory would count as this process's too
    into = view if view is not None and whole else torch.empty(size(part), dtype=full.dtype, device=full.device)
    memory = memoryview((ctypes.c_char * into.nbytes).from_address(into.data_ptr())).cast("B")
    while memory:
        done = os.preadv(segment.descriptor, [memory], start)
        assert done > 0, "memory that another process shares is shorter than it said"
        memory, start = memory[done:], start + done
    if not whole:
        put_shard(full, part, into)


def _add(tensors: Sequence[Tensor], total: Tensor) -> None:
    """Add up in order, in blocks: what was just written is still in the cache when the next is added."""
    if not all(tensor.is_contiguous() for tensor in (total, *tensors)):
        combine(tensors, "sum", total)
        return
    blocks = [tensor.view(-1).split(BLOCK // total.itemsize) for tensor in (total, *tensors)]
    for out, *parts in zip(*blocks, strict=True):
        combine(parts, "sum", out)

"""Full tensors of shards: `weft.full_tensor`, `weft.full_shape` and `weft.shard_like`.

In: a parameter of which this rank holds a part, its gradient, or what was computed of them element by element
(`checks/shard_tensor.py`). Out: all of it, on every rank; all ranks call it at the same place. And back: what belongs
to a parameter on this rank of a full tensor.

    full = weft.full_tensor(parameter.grad)
    parameter.grad.mul_(torch.clamp(1.0 / full.norm(), max=1.0))
    parameter.copy_(weft.shard_like(values, parameter))

Promised: each element is taken from one rank, and is the same on all. A tensor that is no part is full as it is, so
that a loop is the same under every plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event

import torch
from torch import Tensor

from weft.errors import Refuse, WeftError
from weft.runtime.checks.shard_rules import Held, Shard, held_of
from weft.runtime.checks.shard_tensor import like, plainly, show_as_shard
from weft.runtime.layout.execute import put, size, take, together
from weft.runtime.layout.index import Shape, nothing
from weft.runtime.layout.transfer import Index
from weft.runtime.program.stored import shapes_of
from weft.runtime.training.one_rank import OneRank
from weft.runtime.training.shard_owners import ShardOwners

GONE = ("{0} is part of a parallel module that is gone", "keep the parallel module as long as its parameters are used")
COPY = (
    "full_tensor of {0}, which a further stage of this rank holds in another layout",
    "take the full tensor of the parameter under its own name, without @",
)
HERE = (
    "full_tensor of what was computed of {0}: with emulate=True the ranks are threads, and this is of one of them",
    "take the full tensor first, and compute with it: weft.full_tensor(parameter), weft.full_tensor(parameter.grad)",
)


@plainly
@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """All of a parameter, a gradient, or what was computed of them element by element: a new tensor, on every rank.
    All ranks call it at the same place."""
    held = held_of(tensor)
    if held is None:
        return tensor.detach().clone()
    if held.is_addend:
        raise held.shard.refuse(
            f"full_tensor of a sum over elements of {held.shard.name}", "weft.full_tensor(parameter), and the sum of it"
        )
    return held.shard.gather(tensor.detach(), held)


@plainly
def full_shape(tensor: Tensor) -> torch.Size:
    """The shape of all of what a tensor is a part of, as on one device; its own if it is no part."""
    held = held_of(tensor)
    return tensor.shape if held is None else torch.Size(_shape(held, tensor))


@plainly
@torch.no_grad()
def shard_like(full: Tensor, parameter: Tensor) -> Tensor:
    """The part of a full tensor that belongs to a parameter, or to its gradient, on this rank: a new tensor."""
    held = held_of(parameter)
    shape = tuple(parameter.shape) if held is None else _shape(held, parameter)
    if tuple(full.shape) != shape:
        what = "the tensor" if held is None else held.shard.name
        refuse = _plain_error if held is None else held.shard.refuse
        raise refuse(f"shard_like was given shape {list(full.shape)}, and {what} has {list(shape)}", "a full tensor")
    if held is None:
        return full.detach().clone()
    if not parameter.numel():
        return like(full.new_empty(parameter.shape), parameter)
    return like(take(full.detach(), _index(held, held.shard.mine, parameter)).clone(), parameter)


def _plain_error(message: str, remedy: str) -> Exception:
    return WeftError(message, remedy=remedy)


def _shape(held: Held, part: Tensor) -> Shape:
    """Of all of what a tensor is a part of."""
    own = zip(held.dims, part.shape, strict=True)
    # of a number an empty part has one dim, and all of it none
    found = ((length,) if dim is None else held.shard.shape[dim : dim + 1] for dim, length in own)
    return tuple(length for one in found for length in one)


def _index(held: Held, rank: Index, part: Tensor) -> Index:
    """What a rank that holds `rank` of the parameter has of a tensor that is held so."""
    own = zip(held.dims, part.shape, strict=True)
    found = ((((0, length),),) if dim is None else rank[dim : dim + 1] for dim, length in own)
    return tuple(runs for one in found for runs in one)


def show_shards(module: OneRank, owners: ShardOwners, refuse: Refuse, told: Event, here: Here | None = None) -> None:
    """Let users see as shards what the rank holds in part.

    Args:
        owners: what each rank of the replica holds.
        told: that sizes are those of parts.
        here: brings together what ranks hold, if all are here and one caller has them all.
    """
    originals, copies = shapes_of(module.program), module.masters.apart
    for name, parameter in module.named_parameters():
        copy = copies.get(name)
        original = originals[name if copy is None else copy.name]
        mine = module.stored[name] if copy is None else copy.index
        # another layout of what stands under its own name, which is to be asked
        none = nothing(original.shape)
        everybody = (mine,) if copy else tuple(one.get(original.names[0], none) for one in owners.ranks)
        gather = here or partial(_sent, weakref.ref(module))
        shard = Shard(name, original.shape, mine, everybody, refuse, gather, weakref.ref(parameter), told)
        if any(size(index) != original.shape for index in everybody):
            show_as_shard(parameter, shard)


def _sent(module: weakref.ref[OneRank], part: Tensor, held: Held) -> Tensor:
    """Each rank is sent what it lacks."""
    shard, transport = held.shard, _alive(module, held).program.transport
    if len(shard.ranks) != transport.num_ranks:
        raise shard.refuse(*(text.format(shard.name) for text in COPY))
    holders = _holders(held, part)
    group = tuple(range(transport.num_ranks))
    others = [rank for rank in group if rank != transport.rank]
    gives = transport.rank in holders.values()
    sends = {rank: [part.to(transport.device).contiguous()] for rank in others} if gives else {}
    expects = {rank: [(size(index), part.dtype)] for index, rank in holders.items() if rank != transport.rank}
    came = transport.all_to_all(sends, expects, group)
    return _put_together(held, part, {i: part if r == transport.rank else came[r][0] for i, r in holders.items()})


@dataclass
class _Told:
    """What a call on one rank gave, for the others, which come to the same call later."""

    step: int
    full: Tensor
    ranks: set[int]


class Here:
    """Full tensors where all ranks are here, and one caller goes from one to the next.

    A rank's call gives what the first rank's gave, as a collective does: the caller may have written to the first
    rank's part since. A rank whose own part is another by now has come to a later call.
    """

    def __init__(self, ranks: Sequence[OneRank]) -> None:
        self._ranks = tuple(map(weakref.ref, ranks))
        self._told: dict[tuple[str, int], _Told] = {}

    def __call__(self, part: Tensor, held: Held) -> Tensor:
        modules = [_alive(one, held) for one in self._ranks]
        shown = {rank: one.get_parameter(held.shard.name) for rank, one in enumerate(modules)}
        kinds: list[dict[int, Tensor | None]] = [
            {rank: one.detach() for rank, one in shown.items()},
            {rank: one.grad for rank, one in shown.items()},
        ]
        for kind, parts in enumerate(kinds):
            for rank, mine in parts.items():
                if mine is not None and _same(mine, part):
                    return self._full(held, (held.shard.name, kind), parts, rank, modules[rank].step)
        raise held.shard.refuse(*(text.format(held.shard.name) for text in HERE))

    def _full(
        self, held: Held, key: tuple[str, int], parts: Mapping[int, Tensor | None], rank: int, step: int
    ) -> Tensor:
        told, mine = self._told.get(key), parts[rank]
        assert mine is not None
        is_new = told is None or told.step != step or rank in told.ranks
        if told is None or is_new or self._differs(held, told.full, mine):
            ranks = held.shard.ranks
            pieces = {ranks[r]: one for r, one in parts.items() if one is not None and one.numel()}
            told = self._told[key] = _Told(step, _put_together(held, mine, pieces), set())
        told.ranks.add(rank)
        if len(told.ranks) == len(parts):
            del self._told[key]
        return told.full.clone()

    def _differs(self, held: Held, full: Tensor, mine: Tensor) -> bool:
        return bool(mine.numel()) and not torch.equal(take(full, _index(held, held.shard.mine, mine)), mine)


def _same(one: Tensor, other: Tensor) -> bool:
    """True if two are the same elements; those without any lie in one memory too."""
    return together(one, other) and one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _put_together(held: Held, part: Tensor, pieces: Mapping[Index, Tensor]) -> Tensor:
    found = part.new_zeros(_shape(held, part))
    for index, piece in pieces.items():
        put(found, index, piece.to(part.device))
    return found


def _holders(held: Held, part: Tensor) -> dict[Index, int]:
    """The ranks that give something, each something else."""
    found: dict[Index, int] = {}
    for rank, one in enumerate(held.shard.ranks):
        if all(size(one)) and all(size(index := _index(held, one, part))):
            found.setdefault(index, rank)
    return found


def _alive(module: weakref.ref[OneRank], held: Held) -> OneRank:
    found = module()
    if found is None:
        raise held.shard.refuse(*(text.format(held.shard.name) for text in GONE))
    return found

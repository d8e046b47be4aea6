"""Collectives: how generated code changes layouts. One of them per module, as `self.comm`.

In: this rank's local tensors and what is to happen to them, as Moves along named axes of the grid or, where a change
does not follow the axes, as a key of the tables beside the program. Out: local tensors in the new layout. Every call
says what backward does, and backward runs it on every rank, used or not, because each call leaves a token on the tape.
Results are those of `runtime/layout/reshard.py` and `execute.py`, which do the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.runtime.layout.cuts import Axes, Cut, as_axes
from weft.runtime.layout.execute import execute_all
from weft.runtime.layout.inputs import moved
from weft.runtime.layout.intern import Numbers
from weft.runtime.layout.moves import Move, all_reduce, chain, slice_to
from weft.runtime.layout.reshard import Reshard, run_reshard
from weft.runtime.layout.transfer import Transfer
from weft.runtime.links.transport import Doing, GroupComm
from weft.runtime.program.lines import place_here, within
from weft.runtime.weights.by_chunk import ByChunk, ChunkRoute
from weft.runtime.weights.tape import tie
from weft.runtime.weights.unshard import Gather
from weft.runtime.weights.unsharded import Use

if TYPE_CHECKING:
    from weft.runtime.program.module import ParallelModule

Parts = Tensor | tuple[Tensor, ...] | None
"""What a rank holds of a value: a tensor, one for each of its chunks, or nothing."""

Moves = Sequence[Move]


@dataclass(frozen=True)
class Irregular(Reshard):
    """A change of layout that does not follow the axes: this rank's transfers, from the tables of the program."""

    chunks: bool
    """The result is a tuple with a tensor per chunk, even if there is one."""
    by_chunk: tuple[ChunkRoute, ...] = ()
    """For a parameter that is gathered chunk by chunk: the ways of each."""


@dataclass(frozen=True)
class _Way:
    """How a parameter is brought to where it is used, and its gradient back. `gather`: anew for each use."""

    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]
    gather: Gather | None


class Collectives:
    """Changes of layout along the axes of the grid, for one rank.

    Args:
        module: whose tensors these are.
    """

    def __init__(self, module: ParallelModule, tables: Mapping[str, Irregular]) -> None:
        self._module, self._tables = module, dict(tables)
        self._transport, self._place = module.transport, module.place
        self._steps: dict[Any, tuple[str, Reshard]] = {}
        self._numbers = Numbers()
        self._gathers: dict[tuple[str, int], Gather] = {}
        self._ways: dict[tuple[str, tuple[Move, ...], tuple[Move, ...]], _Way] = {}
        self._chains: dict[Any, tuple[tuple[Transfer, ...], tuple[int, ...]]] = {}
        self._groups: dict[tuple[str, ...], GroupComm] = {}

    def all_reduce(self, x: Tensor, over: Axes, *, grad: bool = True) -> Tensor:
        """Addends along the axes become their sum; backward passes the gradient on, which is complete on every rank.

        `grad=False`: no gradient flows."""
        return self.reshard(x, [all_reduce(over)], [] if grad else None)

    def sum_grad(self, x: Tensor, over: Axes) -> Tensor:
        """The tensor as it is; backward sums its gradient along the axes, where every rank has an addend of it."""
        return self.reshard(x, [], [all_reduce(over)])

    def slice(self, x: Tensor, dim: int, over: Axes | Cut) -> Tensor:
        """This rank's part of a dim of a tensor that needs no gradient; on the rank's device, wherever that lies."""
        return moved(self.reshard(x, [slice_to(dim, over)], None), self._transport.device)

    def reshard(self, x: Tensor, forward: Moves, backward: Moves | None) -> Tensor:
        """Forward and backward as told. `backward=None`: no gradient flows."""
        named = self._step(tuple(forward), None if backward is None else tuple(backward), x)
        return self._run(*named, [x])[0]

    def move(self, x: Parts, key: str) -> Any:
        """A change of layout from the tables: a tensor, one per chunk, or None, as the rank holds of the result."""
        found = self._tables[key]
        return _joined(self._run(key, found, _listed(x)), found.chunks)

    def know(self, key: str, found: Irregular) -> str:
        """One more change of layout for `move` and `use_parts`; its key."""
        self._tables.setdefault(key, found)
        return key

    def use(self, parameter: Tensor, forward: Moves, *, sync: Moves) -> Tensor:
        """A trained parameter in another layout than it is stored in; `sync` brings the gradient of this use back."""
        name = self._module.name_of(parameter)
        # gradients of this use have a leaf of their own, and the parameter may be laid elsewhere
        parameter = self._module.part(name)
        way = self._way(name, parameter, tuple(forward), tuple(sync))
        if way.gather is None:
            return self._used(name, [parameter], way.forward, way.backward, parameter.dtype, tell=True)[0]
        use, tape = self._use(way.gather), self._module.tape
        if not torch.is_grad_enabled():
            return use.whole().detach()
        return tape.first(use, *tape.expect(use, way.backward, now=True))

    def _way(self, name: str, parameter: Tensor, forward: tuple[Move, ...], sync: tuple[Move, ...]) -> _Way:
        key = name, forward, sync
        found = self._ways.get(key)
        if found is None or (found.gather is not None and found.gather.stored is not parameter):
            transfers, shape = self._chain(forward, tuple(parameter.shape))
            talks = any(transfer.kind != "local" for transfer in transfers) and not self._module.keeps(name)
            gather = self._gather(name, parameter, transfers) if talks else None
            found = self._ways[key] = _Way(transfers, self._chain(sync, shape)[0], gather)
        return found

    def gather(self, name: str, moves: Moves) -> Gather:
        """How a parameter that this rank stores a shard of is brought to where it is used."""
        parameter = self._module.part(name)
        return self._gather(name, parameter, self._chain(tuple(moves), tuple(parameter.shape))[0])

    def _gather(self, name: str, parameter: Tensor, transfers: tuple[Transfer, ...]) -> Gather:
        key = name, self._numbers.of(transfers)
        found = self._gathers.get(key)
        if found is None or found.stored is not parameter:
            found = self._gathers[key] = Gather(name, parameter, transfers, self._transport)
        return found

    def _use(self, gather: Gather) -> Use:
        return Use(gather, self._module.prefetch, self._module.prefetch_back, self._module.refusal)

    def use_parts(self, parameter: Tensor | str, key: str) -> Any:
        """The same with transfers from the tables; a rank that stores nothing of the parameter gives its name."""
        found = self._tables[key]
        name = parameter if isinstance(parameter, str) else self._module.name_of(parameter)
        if isinstance(parameter, Tensor):
            parameter = self._module.part(name)
        if found.by_chunk and isinstance(parameter, Tensor):
            uses = [self._use(self._gather(name, parameter, way.forward)) for way in found.by_chunk]
            return ByChunk(self._module, uses, [way.backward for way in found.by_chunk])
        sources = [] if isinstance(parameter, str) else [parameter]
        parts = self._used(name, sources, found.forward, found.backward, found.dtype)
        return _joined(parts, found.chunks)

    def _used(
        self,
        name: str,
        sources: Sequence[Tensor],
        forward: tuple[Transfer, ...],
        sync: tuple[Transfer, ...] | None,
        dtype: torch.dtype,
        *,
        tell: bool = False,
    ) -> list[Tensor]:
        self._transport.doing = Doing(within(self._module, f"use of {name}"), place_here())
        if self._module.keeps(name):
            parts = self._module.full_weights.get(name, sources, forward, self._transport, dtype)
        else:
            parts = execute_all(forward, sources, self._transport, dtype=dtype)
        if sync is None or not torch.is_grad_enabled():
            return [part.detach() for part in parts]
        self._module.tape.relied.add(name)
        return self._module.tape.use(name, parts, sync, dtype, tell=tell)

    def along(self, axes: Axes) -> GroupComm:
        """The communicator of the ranks along these axes, for operators that talk."""
        names = as_axes(axes)
        if names not in self._groups:
            self._groups[names] = GroupComm(self._transport, self._place.group(names))
        return self._groups[names]

    def among(self, ranks: Sequence[int]) -> GroupComm:
        """The communicator of some ranks, in this order."""
        return GroupComm(self._transport, tuple(ranks))

    def reached(self, *results: Tensor) -> Any:
        """What an operator that talks has made, so that backward reaches it on every rank, used or not."""
        tied = tie(results, self._module.tape.tokens)
        return tied[0] if len(tied) == 1 else tuple(tied)

    def _run(self, name: str, step: Reshard, sources: Sequence[Tensor]) -> list[Tensor]:
        doing = Doing(within(self._module, f"reshard {name}"), place_here())
        results, token = run_reshard(name, step, sources, self._transport, self._module.anchor, doing)
        if token is not None:
            self._module.tape.tokens.append(token)
        return results

    def _step(self, forward: tuple[Move, ...], backward: tuple[Move, ...] | None, x: Tensor) -> tuple[str, Reshard]:
        key = (forward, backward, x.shape, x.dtype)
        if key not in self._steps:
            shape = tuple(x.shape)
            there, target = self._chain(forward, shape)
            back = None if backward is None else self._chain(backward, target)[0]
            name = " then ".join(f"{move.kind} over {', '.join(move.axes)}" for move in (*forward, *(backward or ())))
            self._steps[key] = name, Reshard(there, back, (shape,), (target,), x.dtype)
        return self._steps[key]

    def _chain(self, moves: tuple[Move, ...], shape: tuple[int, ...]) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
        """The transfers of moves one after the other, and the shape of what comes out."""
        key = moves, shape
        if key not in self._chains:
            self._chains[key] = chain(moves, shape, self._place)
        return self._chains[key]


def _listed(parts: Parts) -> list[Tensor]:
    if parts is None:
        return []
    return [parts] if isinstance(parts, Tensor) else list(parts)


def _joined(parts: Sequence[Tensor], chunks: bool) -> Any:
    if chunks:
        return tuple(parts)
    return parts[0] if parts else None

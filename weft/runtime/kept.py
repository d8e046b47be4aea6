"""Kept weights: what the optimizer updates in parts stays as it is used.

In: a trained parameter's part and the transfers that bring it to where it is used. Out: the whole, in memory that is
kept: brought up to date at its first use in every turn (a forward, or a step of several micro-batches), since nobody
can see from outside whether weights were changed. Where a part is a contiguous piece of its whole, the parameter lies
in it, so that it takes no memory of its own.

Promised: a backward whose forward used weights that were changed in place since is an error, as it is for autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from weft.runtime.script import Index, Transfer
from weft.runtime.transfers import execute_all
from weft.runtime.transport import Transport

Transfers = tuple[Transfer, ...]


@dataclass
class _Whole:
    """The wholes of one parameter for one way of using it, as of some turn."""

    tensors: list[Tensor]
    turn: int


class Kept:
    """The kept wholes of the programs that share parameters."""

    def __init__(self) -> None:
        self._wholes: dict[tuple[str, Transfers], _Whole] = {}
        self._turn = 0

    def begin(self) -> None:
        """From now on weights may be others than before."""
        self._turn += 1

    def wholes(
        self, name: str, parts: Sequence[Tensor], transfers: Transfers, transport: Transport, dtype: torch.dtype
    ) -> list[Tensor]:
        """A parameter as it is used: a tensor per chunk."""
        found = self._wholes.get((name, transfers))
        if found is not None and found.turn == self._turn:
            return found.tensors
        made = execute_all(transfers, [part.detach() for part in parts], transport, dtype=dtype)
        if found is None:
            # what nothing was sent for may be the part itself
            made = [one.clone() if any(_shares(one, part) for part in parts) else one for one in made]
            _lay_in(parts, made, transfers, transport.rank)
            self._wholes[name, transfers] = _Whole(made, self._turn)
            return made
        for kept, new in zip(found.tensors, made, strict=True):
            # whether a backward still needs the old content is asked of the parameter (`tape.py`)
            with _unsafe_preserve_version_counter(kept):
                kept.copy_(new)
        found.turn = self._turn
        return found.tensors

    def memory(self) -> list[Tensor]:
        """All wholes that are kept."""
        return [one for whole in self._wholes.values() for one in whole.tensors]


@torch.no_grad()
def _lay_in(parts: Sequence[Tensor], wholes: Sequence[Tensor], transfers: Transfers, rank: int) -> None:
    """Let a parameter lie in its whole, where it is a contiguous piece of it."""
    if len(parts) != 1 or len(wholes) != 1 or len(transfers) != 1 or transfers[0].kind != "all_gather":
        return
    own = [piece for piece in transfers[0].receives if piece.peer == rank]
    view = _narrowed(wholes[0], own[0].index) if len(own) == 1 else None
    if view is not None and view.is_contiguous() and view.shape == parts[0].shape and view.dtype == parts[0].dtype:
        parts[0].data = view


def _narrowed(whole: Tensor, index: Index) -> Tensor | None:
    for dim, intervals in enumerate(index):
        if len(intervals) != 1:
            return None
        ((start, stop),) = intervals
        whole = whole.narrow(dim, start, stop - start)
    return whole


def _shares(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)

"""Kept weights: what the optimizer updates in parts stays as it is used.

In: a trained parameter's part and the transfers that bring it to where it is used. Out: the whole, in memory that is
kept: brought up to date at its first use in every turn (a forward, or a step of several micro-batches), since nobody
can see from outside whether weights were changed. From the second turn on, all that the turn before has used come
several at a time (`pulls.py`), the later ones while the first are used. Where a part is a contiguous piece of its
whole, the parameter lies in it, so that it takes no memory of its own.

Promised: a backward whose forward used weights that were changed in place since is an error, as it is for autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from weft.runtime.numbers import Numbers
from weft.runtime.pulls import Pull, Transfers, Whole, lie_in, make_pulls
from weft.runtime.transfers import execute_all, together
from weft.runtime.transport import Transport

Key = tuple[str, int]
"""A parameter, and the number of how it is brought to where it is used."""


class Kept:
    """The kept wholes of the programs that share parameters."""

    def __init__(self) -> None:
        self._wholes: dict[Key, Whole] = {}
        self._numbers = Numbers()
        self._turn = 0
        self._asked: list[Key] = []
        """What was asked for in this turn, in order."""
        self._turns: dict[Key, tuple[Key, ...]] = {}
        """The same in an earlier turn that began alike, by what it began with."""
        self._pulls: dict[tuple[Key, ...], list[Pull]] = {}
        self._pending: dict[Key, Pull] = {}

    def begin(self) -> None:
        """From now on weights may be others than before."""
        for pull in self._pending.values():
            pull.wait()
        self._pending = {}
        if self._asked:
            self._turns[self._asked[0]] = tuple(self._asked)
        self._asked = []
        self._turn += 1

    def wholes(
        self, name: str, parts: Sequence[Tensor], transfers: Transfers, transport: Transport, dtype: torch.dtype
    ) -> list[Tensor]:
        """A parameter as it is used: a tensor per chunk."""
        key = name, self._numbers.of(transfers)
        found = self._wholes.get(key)
        if found is not None and found.turn == self._turn:
            return found.tensors
        if not self._asked:
            self._start(key, transport)
        self._asked.append(key)
        if found is not None and self._waited(key, found, parts):
            return found.tensors
        made = execute_all(transfers, [part.detach() for part in parts], transport, dtype=dtype)
        if found is None:
            # what nothing was sent for may be the part itself
            made = [one.clone() if any(together(one, part) for part in parts) else one for one in made]
            found = self._wholes[key] = Whole(name, made, tuple(parts), transfers)
            lie_in(found, transport.rank)
        else:
            for kept, new in zip(found.tensors, made, strict=True):
                # whether a backward still needs the old content is asked of the parameter (`tape.py`)
                with _unsafe_preserve_version_counter(kept):
                    kept.copy_(new)
            found.parts = tuple(parts)
        found.turn = self._turn
        return found.tensors

    def memory(self) -> list[Tensor]:
        """All wholes that are kept."""
        return [one for whole in self._wholes.values() for one in whole.tensors]

    def _start(self, first: Key, transport: Transport) -> None:
        """Begin to bring what a turn that begins so will ask for."""
        keys = self._turns.get(first, ())
        if keys not in self._pulls:
            self._pulls[keys] = make_pulls([self._wholes[key] for key in keys if key in self._wholes], transport)
        for pull in self._pulls[keys]:
            pull.start()
            self._pending.update(((whole.name, self._numbers.of(whole.transfers)), pull) for whole in pull.wholes)

    def _waited(self, key: Key, whole: Whole, parts: Sequence[Tensor]) -> bool:
        """True if a whole has been brought up to date by a pull."""
        pull = self._pending.pop(key, None)
        if pull is None:
            return False
        pull.wait()
        whole.turn = self._turn
        return len(parts) == len(whole.parts) and all(a is b for a, b in zip(parts, whole.parts, strict=True))

"""Weights by chunk: what a loop over chunks uses of a parameter that is stored split, gathered chunk by chunk.

In: for each chunk how its part of the parameter is brought, and how its gradient is reduced. Out: something that stands
where a tuple of parts would: `weight[chunk]` gathers that part, and nothing here holds it. So a chunk has its own parts
of the weights and no others; where the loop is recomputed it gathers them again when it runs again, where it is not,
autograd does (`unsharded.py`). Every part travels once in each direction, and the parts of all chunks are the whole.

Promised: gathers start in one order on all members: a parameter comes so only where all of them run the same chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.runtime.layout.transfer import Transfer
from weft.runtime.weights.gradient import Gradient
from weft.runtime.weights.tape import Tape, Tell
from weft.runtime.weights.unsharded import Use


@dataclass(frozen=True)
class ChunkRoute:
    """How one chunk's part of a parameter comes, and how its gradient is reduced."""

    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]


class Owner(Protocol):
    """The module: its tape is exchanged while a function runs again."""

    tape: Tape


class ByChunk:
    """A parameter in the parts of the chunks.

    Args:
        stored: this rank's part of it.
        uses, ways: how each chunk's part is brought, and how its gradient is reduced.
        tell: hears of gradients.
    """

    def __init__(
        self, owner: Owner, stored: Tensor, uses: Sequence[Use], ways: Sequence[ChunkRoute], anchor: Tensor, tell: Tell
    ) -> None:
        self._owner, self._tape, self._stored, self._anchor = owner, owner.tape, stored, anchor
        self._uses = tuple(uses)
        self._sinks: list[tuple[Gradient, Callable[[], None]]] = []
        if torch.is_grad_enabled():
            for use, way in zip(uses, ways, strict=True):
                shape = way.forward[-1].shapes[0]
                self._sinks.append(self._tape.expect(use.name, shape, way.backward, stored.dtype, tell))

    def __len__(self) -> int:
        return len(self._uses)

    def __getitem__(self, chunk: int) -> Tensor:
        """The part of a chunk, gathered now."""
        use, tape = self._uses[chunk], self._owner.tape
        if not torch.is_grad_enabled():
            return use.whole()
        sink, done = self._sinks[chunk]
        # what is recomputed runs again with a tape of its own
        if tape is not self._tape:
            return tape.edge(use, use.again(), self._anchor, sink, done)
        return tape.first(use, self._stored, self._anchor, sink, done)

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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.runtime.layout.transfer import Transfer
from weft.runtime.weights.gradient import Gradient
from weft.runtime.weights.unsharded import Use

if TYPE_CHECKING:
    from weft.runtime.program.module import ParallelModule


@dataclass(frozen=True)
class ChunkRoute:
    """How one chunk's part of a parameter comes, and how its gradient is reduced."""

    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]


class ByChunk:
    """A parameter in the parts of the chunks.

    Args:
        module: its tape is exchanged while a function runs again.
        uses: how each chunk's part is brought; syncs: how its gradient is reduced.
    """

    def __init__(self, module: ParallelModule, uses: Sequence[Use], syncs: Sequence[tuple[Transfer, ...]]) -> None:
        self._module, self._tape, self._uses = module, module.tape, tuple(uses)
        self._sinks: list[tuple[Gradient, Callable[[], None] | None]] = []
        if torch.is_grad_enabled():
            self._sinks = [self._tape.expect(use, sync) for use, sync in zip(uses, syncs, strict=True)]

    def __len__(self) -> int:
        return len(self._uses)

    def __getitem__(self, chunk: int) -> Tensor:
        """The part of a chunk, gathered now."""
        use, tape = self._uses[chunk], self._module.tape
        if not torch.is_grad_enabled():
            return use.whole()
        # what is recomputed runs again with a tape of its own
        if tape is not self._tape:
            return tape.edge(use, use.again(), *self._sinks[chunk])
        return tape.first(use, *self._sinks[chunk])

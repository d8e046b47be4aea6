"""Gradients of parameters that are used in another layout than they are stored in, reduced to their owners use by use.

In: the uses of a forward (`Used`), and word of what arrives for them. Out: the complete gradients of the stored parts.
The gradient of a use is reduced when backward has passed the use, so that no more than a few full gradients exist at a
time; one that is put off (weight gradients that are made after those of inputs) goes when it comes; what is left, at
the end. Over several micro-batches shards are added up, or full gradients where the parameter says so, which go home
once: when those of all uses have come.

Promised: the collectives come in one order on all members of a group: autograd runs the same program everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.runtime.layout.execute import execute_all, real_dtype
from weft.runtime.layout.intern import Numbers
from weft.runtime.layout.transfer import Transfer
from weft.runtime.links.transport import Doing
from weft.runtime.weights.grad_scatter import Scatter
from weft.runtime.weights.gradient import Gradient, total_of
from weft.runtime.weights.tape import Tape, Used

if TYPE_CHECKING:
    from weft.runtime.program.module import ParallelModule

Route = tuple[str, int]
"""A parameter, and the number of the transfers by which gradients come to where it is stored."""


class UseSync:
    """The uses of one module.

    Args:
        bucket: bytes.
    """

    def __init__(self, module: ParallelModule, *, bucket: int) -> None:
        self._transport, self._sums = module.transport, module.sums
        self._whole = frozenset(name for name, part in module.stored_parts().items() if "gradient" in part.keeps)
        """Parameters whose gradients are added up as they arise over the micro-batches of a step."""
        self._scatter = Scatter(self._transport, self._deliver, bucket=bucket, blocks=module.blocks)
        self._numbers, self._scatters = Numbers(), dict[int, bool]()
        self._wholes: dict[Route, tuple[Gradient, torch.dtype, tuple[Transfer, ...]]] = {}
        self._left: Counter[Route] = Counter()
        """How many uses of each have not been taken, of the forwards that backward has entered."""
        self._backwards = self._entered = 0
        self._held = False
        self._found: dict[str, Gradient] = {}
        self._gone: set[Used] = set()

    def begin(self, backwards: int = 0, held: bool = False) -> None:
        """A step begins, of so many backwards; 0: nobody knows. `held`: gradients may be put off."""
        self._scatter.drop()
        self._backwards, self._entered, self._held = backwards, 0, held
        self._wholes, self._found, self._gone, self._left = {}, {}, set(), Counter()

    def enter(self, tape: Tape) -> None:
        """Backward begins to go through a forward."""
        self._entered += 1
        self._left.update(self._way(use) for use in tape.used if use.parameter in self._whole)

    def buffer(self, use: Used, dtype: torch.dtype) -> Tensor | None:
        """Where to write the first addend of the gradient of a use; None if it may lie anywhere."""
        if not self.scatters(use.transfers) or self._sums.added(dtype) not in (None, dtype):
            return None
        if self._way(use) in self._wholes:
            return None
        return self._scatter.buffer(use.leaves[0][0], dtype, use.transfers[0])

    def scatters(self, transfers: tuple[Transfer, ...]) -> bool:
        """True if gradients go that way several at a time."""
        number = self._numbers.of(transfers)
        if number not in self._scatters:
            self._scatters[number] = self._scatter.takes(transfers)
        return self._scatters[number]

    def hear(self, use: Used) -> None:
        """Something has been added to the gradient of a use, or backward has passed it."""
        if use.passed and (use.has_gradient or (use not in self._gone and not self._held)):
            self._take(use)

    def end(self, tapes: Sequence[Tape], order: Sequence[str]) -> Mapping[str, Tensor]:
        """The complete gradients, by parameter.

        Args:
            order: of all trained parameters: the same on all ranks.
        """
        left: dict[str, list[Used]] = {}
        for use in (use for tape in tapes for use in tape.used):
            if use not in self._gone or use.has_gradient:
                left.setdefault(use.parameter, []).append(use)
        for name in order:
            for use in left.get(name, ()):
                self._take(use)
        place = {name: at for at, name in enumerate(order)}
        for way in sorted(self._wholes, key=lambda one: place[one[0]]):
            self._bring_whole(way)
        self._scatter.finish()
        found = {name: total.total for name, total in self._found.items() if total.total is not None}
        self.begin()
        return found

    def _way(self, use: Used) -> Route:
        if use.number is None:
            use.number = self._numbers.of(use.transfers)
        return use.parameter, use.number

    def _take(self, use: Used) -> None:
        """Let the gradient of a use go: home, or to the others of its kind."""
        for _, sink in use.leaves if use.frozen else ():
            sink.clear()
        came = next((sink.total.dtype for _, sink in use.leaves if sink.total is not None), None)
        dtype, first = use.dtype if came == use.dtype else real_dtype(use.dtype), use not in self._gone
        self._gone.add(use)
        owned = len(use.leaves) == 1 and use.leaves[0][1].is_writable()
        parts = [total_of(sink, shape, dtype, self._transport.device) for shape, sink in use.leaves]
        for _, sink in use.leaves:
            sink.clear()
        if use.parameter in self._whole and len(parts) == 1:
            self._add_whole(use, parts[0], dtype, owned=owned, first=first)
        else:
            self._bring(use.parameter, parts, use.transfers, dtype)

    def _add_whole(self, use: Used, gradient: Tensor, dtype: torch.dtype, *, owned: bool, first: bool) -> None:
        way = self._way(use)
        if way in self._wholes:
            self._wholes[way][0].add(gradient)
        else:
            total = Gradient(gradient if owned else None, dtype=self._sums.added(dtype))
            if not owned:
                total.add(gradient)
            self._wholes[way] = total, dtype, use.transfers
        self._left[way] -= first
        if self._entered == self._backwards and not self._left[way]:
            self._bring_whole(way)

    def _bring_whole(self, way: Route) -> None:
        total, dtype, transfers = self._wholes.pop(way)
        assert total.total is not None
        self._bring(way[0], [total.total], transfers, dtype)

    def _bring(self, name: str, parts: Sequence[Tensor], transfers: tuple[Transfer, ...], dtype: torch.dtype) -> None:
        sent = self._sums.sent(dtype) if transfers or not parts else parts[0].dtype
        if name not in self._found:
            self._found[name] = Gradient(dtype=self._sums.added(dtype))
        if len(parts) == 1 and self.scatters(transfers):
            self._scatter.post(name, parts[0].to(sent), transfers[0])
            return
        before, self._transport.doing = self._transport.doing, Doing(f"gradient sync of {name}")
        for result in execute_all(transfers, [one.to(sent) for one in parts], self._transport, dtype=sent):
            self._deliver(name, result)
        self._transport.doing = before

    def _deliver(self, name: str, part: Tensor) -> None:
        self._found[name].add(part)

"""Gradients of parameters that are used in another layout than they are stored in, brought home use by use.

In: the uses of a forward (`Used`), and word whenever something arrives for one. Out: the complete gradients of the
stored parts. How often gradients arrive for a use is learned from the first backward, in which all are brought home at
the end; from then on each goes as soon as as many have come, so that no more than a few whole gradients exist at a
time. What comes later still is brought home at the end. Over several micro-batches parts are added up, or wholes where
the parameter says so, which go home once.

Promised: the collectives come in one order on all members of a group: autograd runs the same program everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.runtime.script import Transfer
from weft.runtime.tape import Tape, Used
from weft.runtime.transfers import execute_all, real_dtype
from weft.runtime.transport import Doing, Transport
from weft.runtime.values import Gradient, total_of

Way = tuple[str, tuple[Transfer, ...]]
"""A parameter, and how gradients come to where it is stored."""


class UseSync:
    """The uses of one module.

    Args:
        whole: parameters whose gradients are added up as they arise over the micro-batches of a step.
    """

    def __init__(self, whole: frozenset[str]) -> None:
        self._whole = whole
        self._expected: Counter[int] | None = None
        """By position on the tape, how often gradients arrive."""
        self._arrivals: dict[int, Counter[int]] = {}
        """The same in the backwards of this step, by tape."""
        self._wholes: dict[Way, tuple[Gradient, torch.dtype]] = {}
        self._found: dict[str, Gradient] = {}

    def begin(self) -> None:
        """A step begins."""
        self._arrivals, self._wholes, self._found = {}, {}, {}

    def arrived(self, transport: Transport, tape: Tape, position: int) -> None:
        """Something has been added to the gradient of a use."""
        counts = self._arrivals.setdefault(id(tape), Counter())
        counts[position] += 1
        if self._expected is not None and counts[position] == self._expected[position]:
            self._take(transport, tape.used[position])

    def end(self, transport: Transport, tapes: Sequence[Tape], order: Sequence[str]) -> Mapping[str, Tensor]:
        """The complete gradients, by parameter.

        Args:
            order: of all trained parameters: the same on all ranks.
        """
        left: dict[str, list[Used]] = {}
        for tape in tapes:
            for at, use in enumerate(tape.used):
                if not self._is_gone(tape, at) or any(sink.total is not None for _, sink in use.leaves):
                    left.setdefault(use.parameter, []).append(use)
        for name in order:
            for use in left.get(name, ()):
                self._take(transport, use)
        place = {name: at for at, name in enumerate(order)}
        for (name, transfers), (total, dtype) in sorted(self._wholes.items(), key=lambda one: place[one[0][0]]):
            assert total.total is not None
            self._bring(transport, name, [total.total], transfers, dtype)
        self._learn(tapes)
        found = {name: total.total for name, total in self._found.items() if total.total is not None}
        self.begin()
        return found

    def _is_gone(self, tape: Tape, at: int) -> bool:
        """True if all that was expected for a use has come, and went on."""
        wanted = 0 if self._expected is None else self._expected[at]
        return 0 < wanted <= self._arrivals.get(id(tape), Counter())[at]

    def _take(self, transport: Transport, use: Used) -> None:
        """Let the gradient of a use go: home, or to the others of its kind."""
        dtype = real_dtype(use.dtype)
        parts = [total_of(sink, shape, dtype, transport.device) for shape, sink in use.leaves]
        for _, sink in use.leaves:
            sink.clear()
        if use.parameter in self._whole and len(parts) == 1:
            self._wholes.setdefault((use.parameter, use.transfers), (Gradient(), dtype))[0].add(parts[0])
        else:
            self._bring(transport, use.parameter, parts, use.transfers, dtype)

    def _bring(
        self,
        transport: Transport,
        name: str,
        parts: Sequence[Tensor],
        transfers: tuple[Transfer, ...],
        dtype: torch.dtype,
    ) -> None:
        before, transport.doing = transport.doing, Doing(f"gradient sync of {name}")
        for result in execute_all(transfers, parts, transport, dtype=dtype):
            self._found.setdefault(name, Gradient()).add(result)
        transport.doing = before

    def _learn(self, tapes: Sequence[Tape]) -> None:
        counts = [self._arrivals.get(id(tape), Counter()) for tape in tapes]
        if self._expected is None and counts and all(one == counts[0] for one in counts):
            self._expected = counts[0]

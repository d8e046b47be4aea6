"""Gradients of parameters that are used in another layout than they are stored in, brought home use by use.

In: the uses of a forward (`Used`), and word whenever something arrives for one. Out: the complete gradients of the
stored parts. How often gradients arrive for a use is learned from the first backward; from then on each goes as soon as
as many have come, so that no more than a few whole gradients exist at a time. In the first one a gradient goes when
autograd has passed all that reads the use, where that can be seen, at the end where not, which is also when what comes
later still is brought home. Over several micro-batches parts are added up, or wholes where the parameter says so, which
go home once: as soon as as many have come as in an earlier step of as many backwards. They go one by one, or several
at a time while backward goes on where the transport can (`homes.py`); products may write them where they are best read
from (`room`).

Promised: the collectives come in one order on all members of a group: autograd runs the same program everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.runtime.homes import Homes
from weft.runtime.numbers import Numbers
from weft.runtime.precision import NO_SUMS, Sums
from weft.runtime.script import Transfer
from weft.runtime.tape import Tape, Used
from weft.runtime.transfers import execute_all, real_dtype
from weft.runtime.transport import Doing, Transport
from weft.runtime.values import Gradient, total_of

Way = tuple[str, int]
"""A parameter, and the number of the transfers by which gradients come to where it is stored."""


class UseSync:
    """The uses of one module.

    Args:
        whole: parameters whose gradients are added up as they arise over the micro-batches of a step.
        sums: in which dtypes.
        together: several gradients may go home at a time.
    """

    def __init__(
        self, transport: Transport, whole: frozenset[str], sums: Sums = NO_SUMS, *, together: bool = True
    ) -> None:
        self._transport, self._whole, self._sums, self._together = transport, whole, sums, together
        self._homes = Homes(transport, self._deliver)
        self._expected: Counter[int] | None = None
        """By position on the tape, how often gradients arrive."""
        self._arrivals: dict[int, Counter[int]] = {}
        """The same in the backwards of this step, by tape."""
        self._numbers, self._goes = Numbers(), dict[int, bool]()
        self._wholes: dict[Way, tuple[Gradient, torch.dtype, tuple[Transfer, ...]]] = {}
        self._num_wholes: Counter[Way] = Counter()
        """How many gradients were added up for each, in this step."""
        self._learned: dict[int, Counter[Way]] = {}
        """The same in an earlier step, by its number of backwards."""
        self._backwards = 0
        self._found: dict[str, Gradient] = {}
        self._gone: set[tuple[int, int]] = set()
        """Tapes and positions of uses whose gradient went on."""

    def begin(self, backwards: int = 0) -> None:
        """A step begins, of so many backwards; 0: nobody knows."""
        self._homes.drop()
        self._backwards = backwards
        self._arrivals, self._wholes, self._found, self._gone = {}, {}, {}, set()
        self._num_wholes = Counter()

    def room(self, use: Used, dtype: torch.dtype) -> Tensor | None:
        """Where to write the first addend of the gradient of a use; None if it may lie anywhere."""
        way = use.parameter, self._numbers.of(use.transfers)
        if not self.goes(use.transfers) or self._sums.added(dtype) not in (None, dtype) or way in self._wholes:
            return None
        return self._homes.room(use.leaves[0][0], dtype, use.transfers[0])

    def goes(self, transfers: tuple[Transfer, ...]) -> bool:
        """True if gradients go that way several at a time."""
        number = self._numbers.of(transfers)
        if number not in self._goes:
            self._goes[number] = self._together and self._homes.takes(transfers)
        return self._goes[number]

    def arrived(self, tape: Tape, position: int) -> None:
        """Something has been added to the gradient of a use."""
        counts = self._arrivals.setdefault(id(tape), Counter())
        counts[position] += 1
        if self._expected is not None and counts[position] == self._expected[position]:
            self._gone.add((id(tape), position))
            self._take(tape.used[position])

    def ended(self, tape: Tape, position: int) -> None:
        """Nothing more will be added to the gradient of a use."""
        if (id(tape), position) not in self._gone:
            self._gone.add((id(tape), position))
            self._take(tape.used[position])

    def end(self, tapes: Sequence[Tape], order: Sequence[str]) -> Mapping[str, Tensor]:
        """The complete gradients, by parameter.

        Args:
            order: of all trained parameters: the same on all ranks.
        """
        left: dict[str, list[Used]] = {}
        for tape in tapes:
            for at, use in enumerate(tape.used):
                if (id(tape), at) not in self._gone or any(sink.total is not None for _, sink in use.leaves):
                    left.setdefault(use.parameter, []).append(use)
        for name in order:
            for use in left.get(name, ()):
                self._take(use)
        place = {name: at for at, name in enumerate(order)}
        for way in sorted(self._wholes, key=lambda one: place[one[0]]):
            self._bring_whole(way)
        self._homes.finish()
        self._learn(tapes)
        found = {name: total.total for name, total in self._found.items() if total.total is not None}
        self.begin()
        return found

    def _take(self, use: Used) -> None:
        """Let the gradient of a use go: home, or to the others of its kind."""
        dtype = real_dtype(use.dtype)
        owned = len(use.leaves) == 1 and use.leaves[0][1].is_writable()
        parts = [total_of(sink, shape, dtype, self._transport.device) for shape, sink in use.leaves]
        for _, sink in use.leaves:
            sink.clear()
        if use.parameter in self._whole and len(parts) == 1:
            self._add_whole(use, parts[0], dtype, owned=owned)
        else:
            self._bring(use.parameter, parts, use.transfers, dtype)

    def _add_whole(self, use: Used, gradient: Tensor, dtype: torch.dtype, *, owned: bool) -> None:
        way = use.parameter, self._numbers.of(use.transfers)
        if way in self._wholes:
            self._wholes[way][0].add(gradient)
        else:
            total = Gradient(gradient if owned else None, dtype=self._sums.added(dtype))
            if not owned:
                total.add(gradient)
            self._wholes[way] = total, dtype, use.transfers
        self._num_wholes[way] += 1
        learned = self._learned.get(self._backwards)
        if learned is not None and self._num_wholes[way] == learned[way]:
            self._bring_whole(way)

    def _bring_whole(self, way: Way) -> None:
        total, dtype, transfers = self._wholes.pop(way)
        assert total.total is not None
        self._bring(way[0], [total.total], transfers, dtype)

    def _bring(self, name: str, parts: Sequence[Tensor], transfers: tuple[Transfer, ...], dtype: torch.dtype) -> None:
        sent = self._sums.sent(dtype) if transfers or not parts else parts[0].dtype
        self._found.setdefault(name, Gradient(dtype=self._sums.added(dtype)))
        if len(parts) == 1 and self.goes(transfers):
            if self._homes.is_open(transfers[0]):
                self._homes.post(name, parts[0].to(sent), transfers[0])
                return
            self._homes.count(parts[0], transfers[0])
        before, self._transport.doing = self._transport.doing, Doing(f"gradient sync of {name}")
        for result in execute_all(transfers, [one.to(sent) for one in parts], self._transport, dtype=sent):
            self._homes.put(name, result)
        self._transport.doing = before

    def _deliver(self, name: str, part: Tensor) -> None:
        self._found[name].add(part)

    def _learn(self, tapes: Sequence[Tape]) -> None:
        counts = [self._arrivals.get(id(tape), Counter()) for tape in tapes]
        if self._expected is None and counts and all(one == counts[0] for one in counts):
            self._expected = counts[0]
        if self._backwards == len(tapes):
            self._learned.setdefault(self._backwards, self._num_wholes)

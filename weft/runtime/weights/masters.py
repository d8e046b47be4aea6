"""Masters: what an optimizer updates where a program computes in another precision (`precision.py`).

In: a rank's program, whose parameters are copies in the dtype that it computes in, and the dtype of each master. Out: a
tree of containers with the masters under the same names, cut as the copies are, buffers shared. `refresh()` brings the
copies up to date: before each forward by itself, and once in a step of micro-batches; `collect()` takes the complete
gradients of the copies into `.grad` of the masters, added to what was there.

Promised: a backward sees the copies that its forward used, or is an error, as for autograd; a forward between does no
harm while weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from weft.runtime.layout.transfer import Index
from weft.runtime.links.transport import Transport
from weft.runtime.program.module import ParallelModule
from weft.runtime.program.stored import Part
from weft.runtime.training.pieces import Pieces
from weft.runtime.weights.precision import NO_SUMS, Mixed

Dtypes = Mapping[str, torch.dtype]
"""Of masters, by all names of a parameter."""
Pair = tuple[nn.Parameter, nn.Parameter]


class Masters:
    """The masters of one program.

    Args:
        at_once: gradients are collected at the end of every backward; otherwise by whoever runs the program.
    """

    def __init__(self, program: ParallelModule, dtypes: Dtypes, *, at_once: bool = True) -> None:
        self.program, self.at_once = program, at_once
        self._dtypes = dtypes
        self._held: dict[str, nn.Parameter] = {}
        self._seen: dict[str, int] = {}
        for name in program.stored_parts():
            copy = program.part(name)
            if isinstance(copy, nn.Parameter) and name in dtypes:
                master = torch.zeros(copy.shape, dtype=dtypes[name], device=copy.device)
                self._held[name] = nn.Parameter(master, requires_grad=copy.requires_grad)
                # its gradient may come in the dtype in which it was added up
                copy.grad_dtype = None
        program.masters = self

    def shown(self) -> list[nn.Parameter]:
        """The masters, if gradients come to them in a backward that the caller starts."""
        return list(self._held.values()) if self.at_once else []

    @torch.no_grad()
    def refresh(self) -> None:
        """Masters may have changed, in ways that nobody sees: bring all copies up to date."""
        changed, same = list[Pair](), list[Pair]()
        self.freeze_copies()
        for name, master in self._held.items():
            copy = self.program.part(name)
            (same if self._seen.get(name) == master._version else changed).append((copy, master))
            self._seen[name] = master._version
        for pairs, quietly in ((changed, False), (same, True)):
            if pairs:
                copies, masters = map(list, zip(*pairs, strict=True))
                # what is the same as before may be written while a backward waits for it
                with _unsafe_preserve_version_counter(tuple(copies)) if quietly else nullcontext():
                    torch._foreach_copy_(copies, masters)

    def freeze_copies(self) -> None:
        """Copies need gradients where their masters do now."""
        for name, master in self._held.items():
            copy = self.program.part(name)
            if copy.requires_grad != master.requires_grad:
                copy.requires_grad_(master.requires_grad)

    @torch.no_grad()
    def collect(self) -> None:
        """Take the gradients of the copies."""
        for name, master in self._held.items():
            copy = self.program.part(name)
            gradient, copy.grad = copy.grad, None
            if gradient is None or not master.requires_grad:
                continue
            if master.grad is None:
                master.grad = gradient.to(master.dtype)
            else:
                master.grad.add_(gradient)
            for hook in tuple((master._post_accumulate_grad_hooks or {}).values()):
                # the user's: autograd itself comes to the copy only
                hook(master)

    # What it holds, as a program tells it.

    @property
    def stored(self) -> Mapping[str, Index]:
        return self.program.stored

    @property
    def transport(self) -> Transport:
        return self.program.transport

    def stored_parts(self) -> dict[str, Part]:
        return as_masters(self.program.stored_parts(), self._dtypes)

    def trained_parts(self) -> dict[str, Part]:
        return as_masters(self.program.trained_parts(), self._dtypes)

    def part(self, name: str) -> Any:
        """The master, or what has none."""
        found = self._held.get(name)
        return self.program.part(name) if found is None else found

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, self.part(name)) for name, _ in self.program.trained())


def masters_of(pieces: Pieces[ParallelModule], mixed: Mixed | None, *, at_once: bool = False) -> Pieces[Masters] | None:
    """The masters of a rank's programs in another precision; `at_once`: as of `Masters`."""
    tell_sums(pieces.modules, mixed)
    if mixed is None:
        return None
    pieces.join_copies()
    made = [Masters(module, mixed.masters, at_once=at_once) for module in pieces.modules]
    parts, trainable = (as_masters(one, mixed.masters) for one in (pieces.parts, pieces.trainable))
    return Pieces(tuple(made), pieces.transport, parts, trainable, pieces.order)


def tell_sums(programs: Iterable[ParallelModule], mixed: Mixed | None) -> None:
    """Let programs add up gradients in the dtypes that were asked for."""
    for program in programs:
        program.sums = NO_SUMS if mixed is None else mixed.sums


def as_masters(parts: Mapping[str, Part], dtypes: Dtypes) -> dict[str, Part]:
    """Parts with the dtype of their masters."""
    return {name: replace(part, dtype=dtypes.get(name, part.dtype)) for name, part in parts.items()}

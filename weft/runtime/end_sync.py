"""Gradient synchronisation: what a ParallelModule asks of it.

In: gradients as autograd brings them. Out: at the end of backward the complete gradient of every stored part, in memory
of its own. `grad_sync.py` does it in buckets, while backward goes on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from weft.runtime.tape import Tape

if TYPE_CHECKING:
    from weft.runtime.module import ParallelModule


class GradSync(Protocol):
    """Makes gradients complete. Called on every rank in the same order."""

    def expect(self, backwards: int) -> None:
        """The coming steps have so many backwards each; 0: nobody knows."""
        ...

    def watching(self, module: ParallelModule) -> AbstractContextManager[Any]:
        """What a forward runs under."""
        ...

    def begin(self, module: ParallelModule) -> None:
        """A backward begins."""
        ...

    def arrived(self, module: ParallelModule, name: str) -> None:
        """Autograd has added to the gradient of a parameter used as stored (`module.sinks[name]`)."""
        ...

    def used(self, module: ParallelModule, tape: Tape, number: int, *, last: bool) -> None:
        """Something has been added to the gradient of a use in another layout (`tape.used[number]`), or, if `last`, no
        more will be."""
        ...

    def end(self, module: ParallelModule, tapes: Sequence[Tape]) -> Mapping[str, Tensor]:
        """Backward is over: the complete gradients of what the rank stores."""
        ...


def separate(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """No two gradients on one memory (autograd may make them so): whoever scales one in place must not scale both."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for name, gradient in gradients.items():
        memory = gradient.untyped_storage()
        # tensors without content lie nowhere, each by itself
        spans, span = seen.setdefault(memory.data_ptr() or memory._cdata, []), _span(gradient)
        at = bisect_left(spans, span)
        before, after = spans[max(at - 1, 0) : at], spans[at : at + 1]
        if (before and before[0][1] > span[0]) or (after and after[0][0] < span[1]):
            gradients[name] = gradient.clone()
        elif gradient.numel():
            spans.insert(at, span)
    return gradients


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in memory; all of the memory if it does not lie there in order."""
    memory = tensor.untyped_storage()
    start, length = (
        (tensor.data_ptr(), tensor.nbytes) if tensor.is_contiguous() else (memory.data_ptr(), memory.nbytes())
    )
    return start, start + length

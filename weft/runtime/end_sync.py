"""Gradient synchronisation: what a ParallelModule asks of it, and the plain way: after backward, one by one.

In: gradients as autograd brings them. Out: at the end of backward the complete gradient of every stored part, in memory
of its own. `grad_sync.py` does the same in buckets, while backward goes on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from weft.runtime.tape import Tape, Used
from weft.runtime.transfers import execute_all, real_dtype
from weft.runtime.transport import Doing
from weft.runtime.values import Gradient, total_of

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


class EndSync:
    """Makes gradients complete after backward, one parameter after the other."""

    def expect(self, backwards: int) -> None:
        return None

    def watching(self, module: ParallelModule) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin(self, module: ParallelModule) -> None:
        return None

    def arrived(self, module: ParallelModule, name: str) -> None:
        return None

    def used(self, module: ParallelModule, tape: Tape, number: int, *, last: bool) -> None:
        return None

    def end(self, module: ParallelModule, tapes: Sequence[Tape]) -> Mapping[str, Tensor]:
        used: dict[str, list[Used]] = {}
        for tape in tapes:
            for use in tape.used:
                used.setdefault(use.parameter, []).append(use)
        found: dict[str, Tensor] = {}
        for name, _ in module.sync_order():
            module.transport.doing = Doing(f"gradient sync of {name}")
            gradient = self._complete(module, name, used.get(name, ()))
            if gradient is not None:
                found[name] = gradient
        module.transport.doing = Doing()
        return separate(found)

    def _complete(self, module: ParallelModule, name: str, used: Sequence[Used]) -> Tensor | None:
        total = Gradient()
        transfers = module.sync_transfers(name)
        sources = []
        if transfers is not None:
            held = module.part(name)
            sources.append(([(held.shape, module.sinks.get(name, Gradient()))], transfers, real_dtype(held.dtype)))
        sources += [(list(use.leaves), use.transfers, use.dtype) for use in used]
        for leaves, path, dtype in sources:
            sent = module.sums.sent(real_dtype(dtype))
            parts = [total_of(sink, shape, sent, module.device) for shape, sink in leaves]
            for result in execute_all(path, parts, module.transport, dtype=sent):
                total.add(result)
        return total.total


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

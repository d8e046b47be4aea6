"""Gradient synchronisation: what a ParallelModule asks of it, and the plain way: after backward, one by one.

In: gradients as autograd brings them. Out: at the end of backward the complete gradient of every stored part, in memory
of its own. `grad_sync.py` does the same in buckets, while backward goes on.
"""

from __future__ import annotations

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

    def used(self, module: ParallelModule, tape: Tape, number: int) -> None:
        """Something has been added to the gradient of a use in another layout (`tape.used[number]`)."""
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

    def used(self, module: ParallelModule, tape: Tape, number: int) -> None:
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
            sources.append(([(held.shape, module.sinks.get(name, Gradient()))], transfers, held.dtype))
        sources += [(list(use.leaves), use.transfers, use.dtype) for use in used]
        for leaves, path, dtype in sources:
            parts = [total_of(sink, shape, real_dtype(dtype), module.device) for shape, sink in leaves]
            for result in execute_all(path, parts, module.transport, dtype=dtype):
                total.add(result)
        return total.total


def separate(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """No two gradients on one memory (autograd may make them so): whoever scales one in place must not scale both."""
    seen: set[int] = set()
    for name, gradient in gradients.items():
        address = gradient.untyped_storage().data_ptr()
        gradients[name] = gradient.clone() if address in seen else gradient
        seen.add(address)
    return gradients

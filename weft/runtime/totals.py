"""Totals: gradients of weights over many backwards, each added to the sum by the product that makes it.

In: a module that holds its gradients (`hold_gradients`) until all micro-batches have come. Out: under `adding(module)`
its products (`direct.py`) add the gradient of their weight to `module.sinks` themselves: none is made elsewhere first.
They do so at once, or, given a queue, when it is run: whoever waits for the gradients of inputs gets them earlier.
A sum of two roundings (product, addition) becomes one of one: equal to autograd's to rounding, the same on all ranks
and in the emulator.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.runtime.direct import Direct, Write
from weft.runtime.module import ParallelModule
from weft.runtime.values import Gradient

Later = deque[tuple[Tensor, Write]]
"""Parameters and what is to be added to their gradients, in the order in which backward came to them."""


def adding(module: ParallelModule, later: Later | None = None) -> Direct:
    """What a forward runs under whose backward is one of several."""
    return Direct(_Totals(module, later), module.anchor)


def add_now(module: ParallelModule, later: Later) -> None:
    """Add what waits in a queue. What a product has kept for it is let go of one by one."""
    totals = _Totals(module)
    while later:
        totals.write(*later.popleft())


@dataclass(frozen=True)
class _Totals:
    """The sums of a module, as products see them."""

    module: ParallelModule
    later: Later | None = None

    def has_slot(self, parameter: Tensor) -> bool:
        return self.module.unwatched(parameter) is not None

    @torch.no_grad()
    def write(self, parameter: Tensor, make: Write) -> None:
        if self.later is not None:
            self.later.append((parameter, make))
            return
        name = self.module.name_of(parameter)
        sink, dtype = self.module.sinks.get(name), self.module.sums.added(parameter.dtype)
        if sink is None or sink.total is None:
            self.module.sinks[name] = Gradient(make(None), dtype=dtype)
        elif sink.is_writable() and sink.total.is_contiguous() and dtype in (None, parameter.dtype):
            make(sink.total, add=True)
        else:
            sink.add(make(None))
        self.module.grad_sync.arrived(self.module, name)

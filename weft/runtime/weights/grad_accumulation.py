"""Gradient accumulation: weight gradients over the backwards of a step, added up by the products that make them.

In: a module that holds its gradients (`hold_gradients`) until all micro-batches have come. Out: under
`accumulating(module)` its products (`products.py`) add the gradient of their weight to the sum themselves, so that no
gradient is made elsewhere first. They do so at once, or, given a `Queue`, when `add_queued` is called: the gradients of
inputs come first, and schedules that split backward give the weights an event of their own. A sum of two roundings
(product, addition) becomes one of one: equal to autograd's to rounding, the same on all ranks and in the emulator.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weft.runtime.program.module import ParallelModule
from weft.runtime.weights.gradient import Gradient
from weft.runtime.weights.products import Direct, Target, Write

Queue = deque[tuple[Target, Write]]
"""Where gradients go and what makes them, in the order in which backward came to them."""


def accumulating(module: ParallelModule, queue: Queue | None = None) -> Direct:
    """What a forward runs under whose backward is one of several."""
    return Direct(_Accumulation(module, queue), module.anchor)


def add_queued(queue: Queue) -> None:
    """Make what waits. What a product has kept for it is let go of one by one."""
    while queue:
        target, make = queue.popleft()
        target(make)


@dataclass(frozen=True)
class _Accumulation:
    """The sums of a module, as its products see them."""

    module: ParallelModule
    queue: Queue | None

    def target(self, weight: Tensor) -> Target | None:
        found = self._sum_of(weight)
        return found if found is None or self.queue is None else partial(_wait, self.queue, found)

    def _sum_of(self, weight: Tensor) -> Target | None:
        name = self.module.unwatched(weight)
        if name is not None:
            return partial(self._add_stored, name, weight.dtype)
        leaf = self.module.tape.known(weight)
        if leaf is None or leaf.is_input:
            return None
        if not weight.is_leaf:
            # gathered for its use: autograd passes the gradient on
            return partial(_send, get_gradient_edge(weight))
        return partial(_add, leaf.sink)

    @torch.no_grad()
    def _add_stored(self, name: str, own: torch.dtype, make: Write) -> None:
        sink, dtype = self.module.sinks.get(name), self.module.sums.added(own)
        if sink is None or sink.total is None:
            self.module.sinks[name] = Gradient(make(None), dtype=dtype)
        elif sink.is_writable() and sink.total.is_contiguous() and dtype in (None, own):
            make(sink.total, add=True)
        else:
            sink.add(make(None))
        self.module.grad_sync.arrived(name)


def _wait(queue: Queue, target: Target, make: Write) -> None:
    queue.append((target, make))


@torch.no_grad()
def _add(sink: Gradient, make: Write) -> None:
    sink.add(make(None))


def _send(edge: GradientEdge, make: Write) -> None:
    with torch.no_grad():
        gradient = make(None)
    torch.autograd.backward([edge], [gradient])

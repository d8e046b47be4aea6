"""Values of a running Script: scopes of tensors, gradients of leaves, what backward starts from.

    Scope    := key -> slot -> tensor, inside another scope or isolated; sinks of the leaves among them
    Gradient := the sum of all that arrives for one leaf
    Tape     := tokens (roots of backward with gradient zero) and the leaves made

Leaves never collect in `.grad`: torch may let the `.grad` of two leaves share memory and then adds to both in place
when it accumulates (two leaves whose views are added: 6 comes out where 4 is right). A Gradient adds in memory of its
own from the second addend on: that of the first if nothing else lies there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.runtime.buffer_pool import is_private
from weft.runtime.index import put
from weft.runtime.script import Free, Give, Index, Instruction, Load, Local, Loop, Region, Reshard, Run, Take


class Gradient:
    """Sums what arrives for one leaf.

    Args:
        own: what has arrived so far, in memory that may be written to.
        dtype: of the sum of several; None: as they arrive. One alone stays as it is.
    """

    def __init__(self, own: Tensor | None = None, *, dtype: torch.dtype | None = None) -> None:
        self.total, self._dtype = own, dtype
        self._private, self._given = own is not None, False

    def add(self, addend: Tensor) -> None:
        if self.total is None:
            self.total = addend
            return
        with torch.no_grad():
            if self._dtype is not None and self.total.dtype != self._dtype:
                self.total, self._private = self.total.to(self._dtype), True
            if self.is_writable():
                self.total.add_(addend)
            else:
                self.total, self._private = self.total + addend, True

    def clear(self) -> None:
        """Let go of what has come."""
        self.total, self._private, self._given = None, False, False

    def is_writable(self) -> bool:
        """True if the sum so far lies in memory of its own."""
        self._private = self._private or (self._given and self.total is not None and is_private(self.total))
        return self._private

    @torch.no_grad()
    def add_at(self, index: Index, addend: Tensor, shape: torch.Size) -> None:
        """Add to a part, without making a whole of the addend."""
        if self.total is None:
            self.total = addend.new_zeros(shape)
        elif not self._private:
            self.total = self.total.clone()
        self._private = True
        put(self.total, index, addend, add=True)

    def collect(self, leaf: Tensor) -> None:
        """Called by autograd whenever it has come to the leaf, also when no gradient came along."""
        gradient = leaf.grad
        if gradient is not None:
            # a tensor of the leaf's own; what else lies in its memory is gone when the next one comes, or is seen then
            self._given = self.total is None or self._given
            leaf.grad = None
            self.add(gradient)


def total_of(sink: Gradient, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What has arrived; zeros if nothing did."""
    if sink.total is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    assert sink.total.shape == shape, f"a gradient has shape {tuple(sink.total.shape)}, planned {tuple(shape)}"
    return sink.total if sink.total.dtype == dtype else sink.total.to(dtype)


def give_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Let a parameter have this gradient, in its own dtype unless any will do (`masters.py`)."""
    if gradient is not None and gradient.dtype != parameter.dtype and parameter.grad_dtype is not None:
        gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient


class Told(Gradient):
    """One that says when something has arrived."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def add(self, addend: Tensor) -> None:
        super().add(addend)
        self._tell()

    def begin(self, own: Tensor) -> None:
        """The first addend, in memory that may be written to."""
        self.total, self._private = own, True
        self._tell()


def make_leaf(tensor: Tensor, sink: Gradient | None = None) -> tuple[Tensor, Gradient]:
    """A fresh leaf on the same memory, and the sum of the gradients that will arrive for it."""
    leaf, sink = tensor.detach().requires_grad_(), sink or Gradient()
    leaf.register_post_accumulate_grad_hook(sink.collect)
    return leaf, sink


@dataclass
class Tape:
    """What one forward leaves for its backward."""

    tokens: list[Tensor] = field(default_factory=list)
    leaves: list[tuple[Local, Gradient]] = field(default_factory=list)
    """Leaves made by Loads."""


class Scope:
    """The values visible at one point. Values made here die with it."""

    def __init__(self, parent: Scope | None = None) -> None:
        self._parent = parent
        self._values: dict[str, dict[int, Tensor]] = {}
        self._sinks: dict[Local, Gradient] = {}

    def _holder(self, key: str) -> Scope | None:
        scope: Scope | None = self
        while scope is not None and key not in scope._values:
            scope = scope._parent
        return scope

    def __contains__(self, key: str) -> bool:
        return self._holder(key) is not None

    def slots(self, key: str) -> dict[int, Tensor]:
        """The tensors of a value; none if the rank holds nothing of it."""
        holder = self._holder(key)
        return {} if holder is None else dict(sorted(holder._values[key].items()))

    def tensor(self, local: Local) -> Tensor:
        holder = self._holder(local.key)
        slots = {} if holder is None else holder._values[local.key]
        assert local.slot in slots, f"no value {local.key} in slot {local.slot} here"
        return slots[local.slot]

    def sink(self, local: Local) -> Gradient | None:
        """Where the gradient of a leaf is summed; None if the value is not a leaf."""
        holder = self._holder(local.key)
        return None if holder is None else holder._sinks.get(local)

    def set(self, local: Local, tensor: Tensor, sink: Gradient | None = None) -> None:
        self._values.setdefault(local.key, {})[local.slot] = tensor
        if sink is not None:
            self._sinks[local] = sink

    def forget(self, key: str) -> None:
        holder = self._holder(key)
        if holder is not None:
            for slot in holder._values.pop(key):
                holder._sinks.pop(Local(key, slot), None)


def locals_in(argument: object) -> Iterator[Local]:
    """The Locals standing in an argument, however deep."""
    if isinstance(argument, Local):
        yield argument
    elif isinstance(argument, tuple | list):
        for one in argument:
            yield from locals_in(one)


def _reads_and_makes(step: Instruction) -> tuple[list[str], list[str]]:
    match step:
        case Load():
            return [], [step.key]
        case Run():
            return [local.key for local in locals_in((step.args, step.kwargs))], [local.key for local in step.outputs]
        case Take():
            return [step.source], [step.target.key]
        case Give():
            return [step.source.key], []
        case Reshard():
            return [step.source], [step.target]
        case Loop():
            return [key for body in step.bodies for key in reads(body)], list(step.gives)
        case Region():
            return list(reads(step.body)), list(step.outputs)
        case _:
            assert isinstance(step, Free), f"{type(step).__name__} cannot stand inside a body"
            return [], []


def reads(body: tuple[Instruction, ...]) -> tuple[str, ...]:
    """The values that a body takes from outside, in order of first use."""
    outside: dict[str, None] = {}
    made: set[str] = set()
    for step in body:
        read, makes = _reads_and_makes(step)
        outside.update((key, None) for key in read if key not in made)
        made.update(makes)
    return tuple(outside)


def add_needing(body: tuple[Instruction, ...], found: set[str]) -> None:
    """Add to `found`, the values that need a gradient outside, those inside the body that may need one."""
    for step in body:
        read, makes = _reads_and_makes(step)
        match step:
            case Load(leaf=True):
                needs = True
            case Reshard():
                needs = step.backward is not None
            case Run():
                needs = step.grad and not found.isdisjoint(read)
            case Give():
                needs, makes = step.source.key in found, [step.target]
            case Loop():
                for inner in step.bodies:
                    add_needing(inner, found)
                continue
            case Region():
                add_needing(step.body, found)
                continue
            case _:
                needs = not found.isdisjoint(read)
        found.update(makes if needs else ())

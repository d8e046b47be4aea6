"""Tape: what one forward of generated code leaves for its backward.

    Tape := tokens (inputs of the last node, so that backward reaches every reshard), leaves, Used ...

A leaf is a tensor whose gradient is summed outside autograd: a parameter brought to where it is used, or what a
recomputed function reads. `Used` knows how the gradient of one use of a parameter comes back to where it is stored.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.gathered import Gathered, Use, as_edge
from weft.runtime.script import Transfer
from weft.runtime.transfers import together
from weft.runtime.values import Gradient, Told, make_leaf


@dataclass(frozen=True)
class Used:
    """One use of a parameter in a layout of its own."""

    parameter: str
    leaves: tuple[tuple[torch.Size, Gradient], ...]
    """Shape and summed gradient, one per chunk."""
    transfers: tuple[Transfer, ...]
    """From the layout of the gradient to where the parameter is stored."""
    dtype: torch.dtype


Tell = Callable[["Tape", int, bool], None]
"""Hears of a tape and the number of a use that a gradient has arrived for it, or (True) that no more will come."""


@dataclass
class Tape:
    """What one forward leaves for its backward."""

    tokens: list[Tensor] = field(default_factory=list)
    used: list[Used] = field(default_factory=list)
    sinks: dict[int, tuple[weakref.ref[Tensor], Gradient]] = field(default_factory=dict)
    """Leaves by identity, and where their gradients are summed. The tape holds no leaf: a gathered weight must go."""
    inputs: set[int] = field(default_factory=set)
    """Leaves, by identity, that stand for what a recomputed function reads: no parameters."""
    gathered: Gathered = field(default_factory=Gathered)
    uses: dict[int, tuple[weakref.ref[Tensor], Use]] = field(default_factory=dict)
    """Leaves, by identity, that were gathered, and how to gather them again."""
    relied: dict[int, tuple[str, Tensor, int]] = field(default_factory=dict)
    """Parts whose wholes are kept and may be overwritten: names and versions, by identity."""
    spent: bool = False
    """A backward has gone through it."""
    results: tuple[tuple[torch.Size, torch.dtype], ...] | None = None
    """Of a function that runs again: what it returned when it ran first."""

    def rely_on(self, name: str, parts: Sequence[Tensor]) -> None:
        """This forward uses kept wholes of these parts: they must stay as they are until its backward."""
        self.relied.update((id(part), (name, part, part._version)) for part in parts)

    def changed(self) -> str | None:
        """The name of a parameter that is relied on and was changed in place; None if there is none."""
        return next((name for name, part, version in self.relied.values() if part._version != version), None)

    def leaf(self, tensor: Tensor, sink: Gradient | None = None) -> tuple[Tensor, Gradient]:
        """A fresh leaf on the same memory."""
        leaf, sink = make_leaf(tensor, sink)
        self.sinks[id(leaf)] = weakref.ref(leaf), sink
        return leaf, sink

    def is_use(self, tensor: Tensor) -> bool:
        """True for a leaf that stands for a parameter."""
        return self.sink(tensor) is not None and id(tensor) not in self.inputs

    def sink(self, tensor: Tensor) -> Gradient | None:
        """Where the gradient of a leaf is summed; None if the tensor is none."""
        found = self.sinks.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]

    def told_of(self, leaf: Tensor) -> tuple[Used, Told] | None:
        """The use that a leaf stands for, and where its gradient is summed; None if none, or if nobody is told."""
        sink = self.sink(leaf)
        if not isinstance(sink, Told):
            return None
        # a weight is mostly used right after it was brought
        found = next((use for use in reversed(self.used) if any(one is sink for _, one in use.leaves)), None)
        return None if found is None or len(found.leaves) != 1 else (found, sink)

    def use(
        self,
        parameter: str,
        parts: Sequence[Tensor],
        transfers: tuple[Transfer, ...],
        dtype: torch.dtype,
        tell: Tell | None = None,
    ) -> list[Tensor]:
        """Leaves in place of the parts of a parameter; their gradients go home by these transfers.

        `tell`: is called when a gradient has arrived for it."""
        pairs = [self.leaf(part, self._sink(tell if len(parts) == 1 else None)) for part in parts]
        self.used.append(Used(parameter, tuple((leaf.shape, sink) for leaf, sink in pairs), transfers, dtype))
        return [leaf for leaf, _ in pairs]

    def _sink(self, tell: Tell | None) -> Gradient:
        number = len(self.used)
        return Gradient() if tell is None else Told(lambda: tell(self, number, False))

    def edge(
        self, use: Use, whole: Tensor, anchor: Tensor, sink: Gradient, done: Callable[[], None] | None = None
    ) -> Tensor:
        """What a use has gathered, as a leaf that dies with it."""
        leaf = as_edge(whole, anchor, sink, done)
        self.sinks[id(leaf)], self.uses[id(leaf)] = (weakref.ref(leaf), sink), (weakref.ref(leaf), use)
        return leaf

    def use_of(self, leaf: Tensor) -> Use | None:
        """How a leaf was gathered; None if it was not."""
        found = self.uses.get(id(leaf))
        return None if found is None or found[0]() is not leaf else found[1]

    def gather(
        self, use: Use, stored: Tensor, shape: Sequence[int], sync: tuple[Transfer, ...], anchor: Tensor, tell: Tell
    ) -> Tensor:
        """A parameter in another layout than it is stored in, as a leaf that dies with its use."""
        sink, done = self.expect(use.name, shape, sync, stored.dtype, tell)
        return self.first(use, stored, anchor, sink, done)

    def first(
        self, use: Use, stored: Tensor, anchor: Tensor, sink: Gradient, done: Callable[[], None] | None = None
    ) -> Tensor:
        """Gather it for the first time: autograd will gather it again."""
        whole = use.whole()
        if together(whole, stored):
            # this member stores all of it; the others gather, and it must come to their transfers in backward too
            whole = whole.clone()
        self.gathered.add(use, whole)
        return self.edge(use, whole, anchor, sink, done)

    def expect(
        self, parameter: str, shape: Sequence[int], sync: tuple[Transfer, ...], dtype: torch.dtype, tell: Tell
    ) -> tuple[Gradient, Callable[[], None]]:
        """Where the gradient of a use that is gathered is summed, and what to call when all of it has come."""
        sink, number = self._sink(tell), len(self.used)
        self.used.append(Used(parameter, ((torch.Size(shape), sink),), sync, dtype))
        return sink, lambda: tell(self, number, True)


def tie(results: Sequence[Tensor], tokens: list[Tensor]) -> list[Tensor]:
    """The results of an operator that talks, tied to a new token: backward reaches it even where they go unused."""
    out = list(results)
    chosen = [i for i, tensor in enumerate(out) if tensor.requires_grad]
    if torch.is_grad_enabled() and chosen:
        *tied, token = _Tie.apply(*(out[i] for i in chosen))
        tokens.append(token)
        for i, tensor in zip(chosen, tied, strict=True):
            out[i] = tensor
    return out


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (*(tensor.detach() for tensor in tensors), tensors[0].new_zeros(()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[:-1]

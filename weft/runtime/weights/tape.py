"""Tape: what one forward of generated code leaves for its backward.

    Tape := tokens (inputs of the last node, so that backward reaches every reshard), leaves, Used ...

A leaf is a tensor whose gradient is summed outside autograd: a parameter brought to where it is used, or what a
recomputed function reads. `Used` knows how the gradient of one use of a parameter comes back to where it is stored.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.layout.execute import together
from weft.runtime.layout.transfer import Transfer
from weft.runtime.weights.gradient import Gradient, Told, make_leaf
from weft.runtime.weights.unsharded import Gathered, Use, edge_and_mark


@dataclass(eq=False)
class Used:
    """One use of a parameter in a layout of its own."""

    parameter: str
    leaves: tuple[tuple[torch.Size, Gradient], ...]
    """Shape and summed gradient, one per chunk."""
    transfers: tuple[Transfer, ...]
    """From the layout of the gradient to where the parameter is stored."""
    dtype: torch.dtype
    number: int | None = None
    """Of its transfers (`use_sync.py`)."""
    passed: bool = False
    """Backward has passed all that reads it: what has not come by then was put off."""

    @property
    def has_gradient(self) -> bool:
        return any(sink.total is not None for _, sink in self.leaves)


MARKED = 1 << 20
"""Bytes of weights between two marks: each is a node of autograd, whose time is that of many small weights."""

Tell = Callable[[Used], None]
"""Hears that something has been added to the gradient of a use, or that backward has passed it."""


@dataclass
class Mark:
    """A place in a forward. When backward has passed it, it has passed all uses that came after it."""

    uses: list[Callable[[], None]] = field(default_factory=list)
    """What to call for those up to the next mark."""
    num_bytes: int = 0

    def add(self, use: Callable[[], None], num_bytes: int) -> None:
        self.uses.append(use)
        self.num_bytes += num_bytes

    def passed(self) -> None:
        for one in reversed(self.uses):
            one()


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
    mark: Mark | None = None
    """The last one."""

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
        anchor: Tensor,
        tell: Tell | None = None,
    ) -> list[Tensor]:
        """Leaves in place of the parts of a parameter; their gradients go home by these transfers.

        `tell`: hears of them."""
        use = self._used(parameter, [part.shape for part in parts], transfers, dtype, tell)
        if tell is not None:
            num_bytes = sum(part.nbytes for part in parts)
            if self.mark is None or self.mark.num_bytes + num_bytes > MARKED:
                self.mark = Mark()
                self.tokens.append(edge_and_mark(anchor, anchor, Gradient(), self.mark.passed)[1])
            self.mark.add(partial(_pass, use, tell), num_bytes)
        return [self.leaf(part, sink)[0] for part, (_, sink) in zip(parts, use.leaves, strict=True)]

    def _used(
        self,
        parameter: str,
        shapes: Sequence[Sequence[int]],
        transfers: tuple[Transfer, ...],
        dtype: torch.dtype,
        tell: Tell | None,
    ) -> Used:
        sinks = [Gradient() if tell is None else Told(lambda: tell(use)) for _ in shapes]
        leaves = tuple((torch.Size(shape), sink) for shape, sink in zip(shapes, sinks, strict=True))
        use = Used(parameter, leaves, transfers, dtype)
        self.used.append(use)
        return use

    def edge(
        self, use: Use, whole: Tensor, anchor: Tensor, sink: Gradient, passed: Callable[[], None] | None = None
    ) -> Tensor:
        """What a use has gathered, as a leaf that dies with it; `passed`: is called when backward has passed it."""
        leaf, token = edge_and_mark(whole, anchor, sink, passed)
        if passed is not None:
            self.tokens.append(token)
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
        return self.first(use, stored, anchor, *self.expect(use.name, shape, sync, stored.dtype, tell))

    def first(
        self, use: Use, stored: Tensor, anchor: Tensor, sink: Gradient, passed: Callable[[], None] | None = None
    ) -> Tensor:
        """Gather it for the first time: autograd will gather it again."""
        whole = use.whole()
        if together(whole, stored):
            # this member stores all of it; the others gather, and it must come to their transfers in backward too
            whole = whole.clone()
        self.gathered.add(use, whole)
        return self.edge(use, whole, anchor, sink, passed)

    def expect(
        self, parameter: str, shape: Sequence[int], sync: tuple[Transfer, ...], dtype: torch.dtype, tell: Tell
    ) -> tuple[Gradient, Callable[[], None]]:
        """Where the gradient of a use that is gathered is summed, and what to call when backward has passed it."""
        use = self._used(parameter, [shape], sync, dtype, tell)
        return use.leaves[0][1], partial(_pass, use, tell)


def _pass(use: Used, tell: Tell) -> None:
    use.passed = True
    tell(use)


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

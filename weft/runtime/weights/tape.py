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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.layout.execute import together
from weft.runtime.layout.transfer import Transfer
from weft.runtime.weights.as_seen import AsSeen
from weft.runtime.weights.gradient import Gradient, make_leaf
from weft.runtime.weights.unsharded import Gathered, Use, as_edge, edge_and_mark, mark


@dataclass(eq=False)
class Used:
    """One use of a parameter in a layout of its own."""

    parameter: str
    transfers: tuple[Transfer, ...]
    """From the layout of the gradient to where the parameter is stored."""
    dtype: torch.dtype
    leaves: tuple[tuple[torch.Size, Gradient], ...] = ()
    """Shape and summed gradient, one per chunk."""
    frozen: bool = False
    """What arrives for it counts as zeros: its parameter needed no gradient in the forward."""
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


class UseGradient(Gradient):
    """The gradient of a use, which says when something has arrived."""

    def __init__(self, use: Used, tell: Tell) -> None:
        super().__init__()
        self.use, self._tell = use, tell

    def add(self, addend: Tensor) -> None:
        super().add(addend)
        self._tell(self.use)

    def begin(self, own: Tensor) -> None:
        """The first addend, in memory that may be written to."""
        self.total, self._private = own, True
        self._tell(self.use)


@dataclass
class Mark:
    """A place in a forward. When backward has passed it, it has passed all uses that came after it."""

    uses: list[Callable[[], None]] = field(default_factory=list)
    """What to call for those up to the next mark."""
    num_bytes: int = 0

    def passed(self) -> None:
        for one in reversed(self.uses):
            one()


class Leaf(NamedTuple):
    """What a tape knows of a leaf, which it does not hold: a gathered weight must go."""

    tensor: weakref.ref[Tensor]
    sink: Gradient
    """Where its gradient is summed."""
    use: Use | None = None
    """How to gather it again, if it was gathered."""
    is_input: bool = False
    """It stands for what a recomputed function reads: no parameter."""


@dataclass
class Tape:
    """What one forward leaves for its backward.

    Args:
        anchor: a leaf of autograd that nobody asks for.
        tell: hears of the gradients of uses.
    """

    anchor: Tensor
    tell: Tell
    marks: bool = False
    """Gathered weights that are small share a mark: their gradients wait for each other."""
    tokens: list[Tensor] = field(default_factory=list)
    used: list[Used] = field(default_factory=list)
    leaves: dict[int, Leaf] = field(default_factory=dict)
    """By identity."""
    gathered: Gathered = field(default_factory=Gathered)
    relied: set[str] = field(default_factory=set)
    """Parameters of which backward uses what this forward has made of them: they must stay as they are."""
    reruns: bool = False
    """Backward runs something again: so must all parameters."""
    seen: AsSeen | None = None
    """The parameters as they were at the end of such a forward."""
    frozen: frozenset[str] = frozenset()
    """Parameters that needed no gradient in this forward: it gives them none, whatever they need by now."""
    outputs: frozenset[int] = frozenset()
    """Those that a gradient has come to, in the backward that goes on."""
    spent: bool = False
    """A backward has gone through it, and no other can."""
    results: tuple[tuple[torch.Size, torch.dtype], ...] | None = None
    """Of a function that runs again: what it returned when it ran first."""
    mark: Mark | None = None
    """The last one."""

    def begin(self, *, spent: bool) -> None:
        """A backward begins; `spent`: it is the last one."""
        self.spent = spent
        for use in self.used:
            use.passed = False

    def changed(self) -> str | None:
        """The name of a parameter that is relied on and was changed since; None if there is none."""
        return None if self.seen is None else self.seen.changed()

    def leaf(self, tensor: Tensor, sink: Gradient, *, is_input: bool = False) -> Tensor:
        """A fresh leaf on the same memory."""
        leaf = make_leaf(tensor, sink)
        self.leaves[id(leaf)] = Leaf(weakref.ref(leaf), sink, is_input=is_input)
        return leaf

    def known(self, tensor: Tensor) -> Leaf | None:
        """What is known of a leaf; None if the tensor is none."""
        found = self.leaves.get(id(tensor))
        return None if found is None or found.tensor() is not tensor else found

    def use(
        self,
        parameter: str,
        parts: Sequence[Tensor],
        transfers: tuple[Transfer, ...],
        dtype: torch.dtype,
        *,
        tell: bool,
    ) -> list[Tensor]:
        """Leaves in place of the parts of a parameter; their gradients are reduced to their owners by these transfers.

        `tell`: they are told of."""
        use = self._used(parameter, [part.shape for part in parts], transfers, dtype, tell=tell)
        if tell:
            self._mark(use, sum(part.nbytes for part in parts))
        return [self.leaf(part, sink) for part, (_, sink) in zip(parts, use.leaves, strict=True)]

    def _mark(self, use: Used, num_bytes: int) -> None:
        """A use begins, of which is told when backward has passed it."""
        if self.mark is None or self.mark.num_bytes + num_bytes > MARKED:
            self.mark = Mark()
            self.tokens.append(mark(self.anchor, self.mark.passed))
        self.mark.uses.append(partial(_pass, use, self.tell))
        self.mark.num_bytes += num_bytes

    def _used(
        self,
        parameter: str,
        shapes: Sequence[Sequence[int]],
        transfers: tuple[Transfer, ...],
        dtype: torch.dtype,
        *,
        tell: bool = True,
    ) -> Used:
        use = Used(parameter, transfers, dtype, frozen=parameter in self.frozen)
        use.leaves = tuple([(torch.Size(one), UseGradient(use, self.tell) if tell else Gradient()) for one in shapes])
        self.used.append(use)
        return use

    def edge(self, use: Use, whole: Tensor, sink: Gradient, passed: Callable[[], None] | None = None) -> Tensor:
        """What a use has gathered, as a leaf that dies with it; `passed`: is called when backward has passed it."""
        if passed is None:
            leaf = as_edge(whole, self.anchor, sink)
        else:
            leaf, token = edge_and_mark(whole, self.anchor, sink, passed)
            self.tokens.append(token)
        self.leaves[id(leaf)] = Leaf(weakref.ref(leaf), sink, use)
        return leaf

    def first(self, use: Use, sink: Gradient, passed: Callable[[], None] | None = None) -> Tensor:
        """Gather a parameter for the first time, as a leaf that dies with its use: autograd will gather it again."""
        whole = use.whole()
        if together(whole, use.gather.stored):
            # this member stores all of it; the others gather, and it must come to their transfers in backward too
            whole = whole.clone()
        self.gathered.add(use, whole)
        return self.edge(use, whole, sink, passed)

    def expect(
        self, use: Use, sync: tuple[Transfer, ...], *, now: bool = False
    ) -> tuple[Gradient, Callable[[], None] | None]:
        """Where the gradient of a use that is gathered is summed, and what to call when backward has passed it; None:
        a mark sees to that. `now`: it begins."""
        used = self._used(use.gather.name, [use.gather.shape], sync, use.gather.dtype)
        passed = None if now and self.marks else partial(_pass, used, self.tell)
        if passed is None:
            self._mark(used, use.gather.num_bytes)
        return used.leaves[0][1], passed


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

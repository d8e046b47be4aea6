"""Endings: the last autograd node of a forward, from which backward enters a generated program.

In: what a rank returns, and the tape of the forward. Out: the same tensors, tied to all that the forward has done. When
a gradient comes back, the module's backward begins: gradients go to what was returned, zeros to the tokens of the tape,
so that every reshard is reached on every rank. The gradients of outputs come from the caller, the same on every rank;
one that does not come counts as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.tape import Tape


class Owner(Protocol):
    """The module whose backward begins."""

    def begin_backward(self, tape: Tape) -> None: ...


def tied_loss(owner: Owner, tape: Tape, anchor: Tensor, value: Tensor, roots: Sequence[Tensor]) -> Tensor:
    """The loss, complete on every rank; its gradient goes to the roots: what the rank holds of it where it was made."""
    live = [root for root in roots if root.requires_grad]
    loss: Tensor = _Loss.apply(owner, tape, len(live), anchor, value.detach(), *live, *_taken(tape))
    return loss


def tied_outputs(owner: Owner, tape: Tape, anchor: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Outputs, complete on every rank. What needs no gradient stays as it is."""
    live = [at for at, value in enumerate(values) if value.requires_grad]
    found = [value if at in live else value.detach() for at, value in enumerate(values)]
    if live:
        made = _Outputs.apply(owner, tape, len(live), anchor, *(values[at] for at in live), *_taken(tape))
        for at, value in zip(live, made, strict=True):
            found[at] = value
    return tuple(found)


def _taken(tape: Tape) -> list[Tensor]:
    """The tokens of a tape, which does not need them any more: through them it would hold the graph, whose leaves tell
    the tape what arrives, and none would ever go."""
    tokens, tape.tokens = tape.tokens, []
    return tokens


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, owner: Owner, tape: Tape, num_roots: int, anchor: Tensor, value: Tensor, *inputs: Tensor
    ) -> Tensor:
        ctx.owner, ctx.tape = owner, tape
        ctx.num_roots, ctx.num_tokens = num_roots, len(inputs) - num_roots
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.owner.begin_backward(ctx.tape)
        zero = torch.zeros((), device=gradient.device)
        return (None, None, None, None, None, *(gradient,) * ctx.num_roots, *(zero,) * ctx.num_tokens)


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, owner: Owner, tape: Tape, num_outputs: int, anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.owner, ctx.tape, ctx.num_tokens = owner, tape, len(inputs) - num_outputs
        # the caller may change an output in place: what backward has kept is another tensor
        return tuple(value.clone() for value in inputs[:num_outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.owner.begin_backward(ctx.tape)
        zero = torch.zeros((), device=gradients[0].device)
        return (None, None, None, None, *gradients, *(zero,) * ctx.num_tokens)

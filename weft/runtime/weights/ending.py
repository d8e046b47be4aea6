"""Endings: the last autograd node of a forward, from which backward enters a generated program.

In: what a rank returns, and the tape of the forward. Out: the same tensors, tied to all that the forward has done. When
a gradient comes back, the module's backward begins: gradients go to what was returned, zeros to the tokens of the tape,
so that every reshard is reached on every rank. The gradients of outputs come from the caller, the same on every rank;
one that does not come counts as zeros.

The parameters that the caller sees are inputs of the node too, though nothing goes to them from here: whoever asks
autograd for some gradients only comes by here, and is refused, and so is who wants to differentiate them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.runtime.weights.tape import Tape


class Owner(Protocol):
    """The module whose backward begins."""

    refusal: Callable[[str, str], Exception]
    """Makes the error for a wrong call."""

    def begin_backward(self, tape: Tape) -> None: ...

    def shown(self) -> list[Tensor]:
        """The parameters that the caller sees, as far as nobody watches them."""
        ...


def tied_loss(owner: Owner, tape: Tape, anchor: Tensor, value: Tensor, roots: Sequence[Tensor]) -> Tensor:
    """The loss, complete on every rank; its gradient goes to the roots: what the rank holds of it where it was made."""
    live = [root for root in roots if root.requires_grad]
    inputs = (*live, *_taken(tape))
    loss: Tensor = _Loss.apply(owner, tape, (len(live), len(inputs)), anchor, value.detach(), *inputs, *owner.shown())
    return loss


def tied_outputs(owner: Owner, tape: Tape, anchor: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Outputs, complete on every rank. What needs no gradient stays as it is."""
    live = [at for at, value in enumerate(values) if value.requires_grad]
    found = [value if at in live else value.detach() for at, value in enumerate(values)]
    if live:
        inputs = (*(values[at] for at in live), *_taken(tape))
        made = _Outputs.apply(owner, tape, (len(live), len(inputs)), anchor, *inputs, *owner.shown())
        for at, value in zip(live, made, strict=True):
            found[at] = value
    return tuple(found)


def _taken(tape: Tape) -> list[Tensor]:
    """The tokens of a tape, which does not need them any more: through them it would hold the graph, whose leaves tell
    the tape what arrives, and none would ever go."""
    tokens, tape.tokens = tape.tokens, []
    return tokens


Counts = tuple[int, int]
"""How many inputs a gradient goes to, and how many there are without the parameters."""

SOME = (
    "only some gradients are asked for (torch.autograd.grad, or backward(inputs=...)), and those of a parallel module "
    "become complete all together",
    "call loss.backward(): all gradients are in .grad afterwards, those of inputs that require one too",
)
AGAIN = (
    "backward(create_graph=True) goes through a parallel module, whose gradients cannot be differentiated again",
    "call backward() without create_graph; a penalty on gradients needs the model on one device",
)


def refuse_parts(ctx: Any, refusal: Callable[[str, str], Exception]) -> None:
    """Refuse a backward that does not go through all of the forward, once and for all.

    `ctx`: of a node whose first input is a leaf that nobody asks for."""
    if torch.is_grad_enabled():
        raise refusal(*AGAIN)
    anchor = next(node for node, _ in ctx.next_functions if node is not None)
    try:
        all_of_it = torch._C._will_engine_execute_node(anchor)
    except RuntimeError:
        # torch cannot tell for a leaf under autograd.grad()
        all_of_it = False
    if not all_of_it:
        raise refusal(*SOME)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, owner: Owner, tape: Tape, counts: Counts, anchor: Tensor, value: Tensor, *inputs: Tensor
    ) -> Tensor:
        ctx.owner, ctx.tape, ctx.counts, ctx.num_inputs = owner, tape, counts, len(inputs)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_parts(ctx, ctx.owner.refusal)
        ctx.owner.begin_backward(ctx.tape)
        return (None, None, None, None, None, *_given(ctx, (gradient,) * ctx.counts[0], gradient.device))


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, owner: Owner, tape: Tape, counts: Counts, anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.owner, ctx.tape, ctx.counts, ctx.num_inputs = owner, tape, counts, len(inputs)
        # the caller may change an output in place: what backward has kept is another tensor
        return tuple(value.clone() for value in inputs[: counts[0]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_parts(ctx, ctx.owner.refusal)
        ctx.owner.begin_backward(ctx.tape)
        return (None, None, None, None, *_given(ctx, gradients, gradients[0].device))


def _given(ctx: Any, gradients: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor | None, ...]:
    """Gradients to what was returned, zeros to tokens, nothing to parameters."""
    num_live, num_tied = ctx.counts
    zero = torch.zeros((), device=device)
    return (*gradients, *(zero,) * (num_tied - num_live), *(None,) * (ctx.num_inputs - num_tied))

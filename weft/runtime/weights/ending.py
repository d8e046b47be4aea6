"""Endings: the last autograd node of a forward, from which backward enters a generated program.

In: what a rank returns, and the tape of the forward. Out: the same tensors, tied to all that the forward has done. When
a gradient comes back, the module's backward begins: gradients go to what was returned, zeros to the tokens of the tape,
so that every reshard is reached on every rank. The gradients of outputs come from the caller, the same on every rank.
One that does not come counts as zeros, and what is reached from such outputs only is left without a gradient: inputs by
`entered`, parameters at the end of backward.

What is made of frozen parameters alone has no graph, as in eager (`LiveOutputs`).

The parameters that the caller sees are inputs of the node too, though nothing goes to them from here: whoever asks
autograd for some gradients only comes by here, and is refused, and so is who wants to differentiate them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.errors import Refuse
from weft.runtime.weights.as_seen import AsSeen
from weft.runtime.weights.tape import Tape

if TYPE_CHECKING:
    from weft.runtime.program.module import ParallelModule
    from weft.runtime.program.stored import Part


Outputs = frozenset[int] | None
"""Positions; None: all that can have a gradient."""


def tied_loss(module: ParallelModule, tape: Tape, value: Tensor, roots: Sequence[Tensor]) -> Tensor:
    """The loss, complete on every rank; its gradient goes to the roots: what the rank holds of it where it was made."""
    (loss,) = _tied(module, tape, value, [root for root in roots if root.requires_grad], (0,))
    return loss


def tied_outputs(
    module: ParallelModule, tape: Tape, values: Sequence[Tensor], some: Collection[int] | None = None
) -> tuple[Tensor, ...]:
    """Outputs, complete on every rank. What needs no gradient stays as it is; `some`: those that may need one."""
    places = [at for at, value in enumerate(values) if value.requires_grad and (some is None or at in some)]
    made = _tied(module, tape, None, [values[at] for at in places], tuple(places)) if places else ()
    tied = dict(zip(places, made, strict=True))
    return tuple(tied[at] if at in tied else value.detach() for at, value in enumerate(values))


def entered(x: Tensor, tape: Tape, outputs: Collection[int] | None) -> Tensor:
    """An input whose gradient comes from these outputs; None: from all."""
    found: Tensor = x if outputs is None or not x.requires_grad else _Entry.apply(x, tape, outputs)
    return found


def _tied(
    module: ParallelModule, tape: Tape, loss: Tensor | None, roots: Sequence[Tensor], places: tuple[int, ...]
) -> tuple[Tensor, ...]:
    if (tape.relied or tape.reruns) and not module.holds_gradients:
        # the caller goes on before backward comes
        relied = [one for one in module.trained() if tape.reruns or one[0] in tape.relied]
        tape.seen = AsSeen(relied, module.samples)
    inputs = (*roots, *_taken(tape))
    # in a list, it is no input: it becomes the output as it is
    value = None if loss is None else [loss.detach()]
    returned = Returned(places)
    tied: tuple[Tensor, ...] = _Ending.apply(
        (module, tape, returned), (len(roots), len(inputs)), module.anchor, value, *inputs, *module.shown()
    )
    # the caller may change an output in place: what backward has kept is another tensor. Each has a node of its own,
    # where the caller's hooks are: they are not called for an output that no gradient comes to
    found = tuple(one.clone() for one in tied)
    returned.outputs = [weakref.ref(one) for one in found]
    return found


class Returned:
    """What a call has returned, as long as the caller holds it.

    Args:
        places: of those that have a gradient, among all outputs.
    """

    def __init__(self, places: Sequence[int] = ()) -> None:
        self._places = places
        self.outputs: Sequence[weakref.ref[Tensor]] = ()
        self._forms: Sequence[tuple[torch.Size, torch.dtype, torch.device]] = ()

    def made(self, values: Sequence[Tensor]) -> None:
        """These will be returned: where no gradient comes, zeros in their form stand for it."""
        self._forms = [(one.shape, one.dtype, one.device) for one in values]

    def refuse_retained(self, found: Sequence[Tensor | None], refusal: Refuse) -> None:
        """Refuse an output that keeps its gradient, or has a hook for it, beside others that have one: what these bring
        to it inside of the program does not come by it."""
        for at, output in enumerate(one() for one in self.outputs):
            if output is None or not (output.retains_grad or output._backward_hooks):
                continue
            if any(one is not None for number, one in enumerate(found) if number != at):
                what = "retain_grad()" if output.retains_grad else "register_hook()"
                raise refusal(f"{what} {RETAINED[0]}", RETAINED[1])

    def used(self, found: Sequence[Tensor | None]) -> frozenset[int]:
        """The outputs that a gradient has come to."""
        return frozenset(at for at, one in zip(self._places, found, strict=True) if one is not None)

    def gradients(self, found: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The gradients of all outputs."""
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) if one is None else one
            for one, (shape, dtype, device) in zip(found, self._forms, strict=True)
        )


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


RETAINED = (
    "was called on an output of a parallel module, and backward starts from another output of the same "
    "call, which may have been made from it: its gradient inside of the program is not seen",
    "let the model return that output, and make the loss of it outside: then its gradient comes by it",
)

FROZEN = (
    "was frozen in one forward and not in another that came later, and backward runs again what was recomputed in the "
    "first: it would read it as it was in the last",
    "call backward before the next forward, or freeze the same parameters in both",
)


def refuse_parts(ctx: Any, refusal: Refuse) -> None:
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


class _Ending(torch.autograd.Function):
    """Returns the loss, whose gradient goes to each root; None: the roots, each of which has its own."""

    @staticmethod
    def forward(
        ctx: Any,
        about: tuple[ParallelModule, Tape, Returned],
        counts: Counts,
        anchor: Tensor,
        loss: list[Tensor] | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        (ctx.module, ctx.tape, ctx.returned), ctx.counts, ctx.num_inputs = about, counts, len(inputs)
        ctx.is_loss = loss is not None
        ctx.set_materialize_grads(False)
        found = tuple(value.detach() for value in inputs[: counts[0]]) if loss is None else (loss.pop(),)
        ctx.returned.made(found)
        return found

    @staticmethod
    def backward(ctx: Any, *found: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients to what was returned, zeros to tokens, nothing to parameters."""
        refuse_parts(ctx, ctx.module.refusal)
        ctx.returned.refuse_retained(found, ctx.module.refusal)
        ctx.tape.outputs = ctx.returned.used(found)
        gradients = ctx.returned.gradients(found)
        ctx.module.begin_backward(ctx.tape)
        num_roots, num_tied = ctx.counts
        zero = torch.zeros((), device=ctx.module.device)
        given = gradients * num_roots if ctx.is_loss else gradients
        return *(None,) * 4, *given, *(zero,) * (num_tied - num_roots), *(None,) * (ctx.num_inputs - num_tied)


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tape: Tape, outputs: Collection[int]) -> Tensor:
        ctx.tape, ctx.outputs = tape, outputs
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        return (None if ctx.tape.outputs.isdisjoint(ctx.outputs) else gradient), None, None


class LiveOutputs:
    """The outputs of one program that have a gradient, though some parameters are frozen for the time being.

    Args:
        parts: how its trained parameters are stored.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = parts
        self.state: object = None
        """Of the parameters, when they were looked at: the same object as long as nothing about them changes."""
        self._found: Outputs = None
        self.frozen: frozenset[str] = frozenset()
        """Parameters that need no gradient."""

    def look(self, trained: Sequence[tuple[str, Tensor]], state: object) -> None:
        """See which parameters are frozen, of those of the model, also what other ranks hold."""
        named = {name for name, one in trained if not one.requires_grad}
        self.frozen = frozenset(n for n, part in self._parts.items() if not named.isdisjoint((n, *part.tied)))
        self.state, self._found = state, self._without() if self.frozen else None

    def _without(self) -> Outputs:
        found = frozenset[int]()
        for name, part in self._parts.items():
            if name not in self.frozen:
                if part.reached_from is None:
                    return None
                found = found.union(part.reached_from)
        return found

    def now(self, inputs: Sequence[Tensor], inputs_from: Mapping[int, Collection[int]]) -> Outputs:
        """Those of a call with these inputs; `inputs_from`: outputs that the gradients of inputs come from, if not
        all."""
        found = self._found
        for at, x in enumerate(inputs):
            if found is not None and x.requires_grad:
                found = found.union(inputs_from[at]) if at in inputs_from else None
        return found

"""Recomputation and loops: bodies that keep nothing but what they read, and run again in backward.

Enters: a Region or Loop and the scope it stands in. Leaves: the values it is to leave behind, set in that scope.
One autograd.Function, reentrant: forward runs the body without autograd on what it reads; backward runs it again with
autograd from fresh leaves and sends the arriving gradients through it at once. A loop does so chunk after chunk, the
last first, and forgets each chunk before the next. Gradients of parameter leaves go straight to their sums. Promised:
every rank runs body and backward in the same order, whether or not a gradient arrives, because reshards inside leave
tokens; and nothing is run twice that writes (traces, buffer updates and gradients are the first run's only, or the
second's only).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.context import Ambient
from weft.runtime.gives import Gives
from weft.runtime.script import Instruction, Local, Loop, Region
from weft.runtime.transfers import take
from weft.runtime.values import Gradient, Scope, Tape, add_needing, make_leaf, reads

Body = tuple[Instruction, ...]
RunBody = Callable[[Body, Scope, Gives | None, Tape, bool], None]
"""Runs a body in a scope; the last argument tells whether it has run before."""


@dataclass(frozen=True)
class Work:
    """What a recomputed region does, without the tensors it reads."""

    bodies: tuple[Body, ...]
    outputs: tuple[str, ...]
    """Values left behind by a Region; a Loop leaves its Gives."""
    gives: tuple[str, ...]
    run: RunBody
    collect: Callable[[Tape], None]
    """Takes over the gradients of parameter leaves made in a body."""


def run_region(step: Region, scope: Scope, work: Work, anchor: Tensor) -> Tensor | None:
    """Run a region, leave its outputs in the scope; a token if a backward will come."""
    outside = _Outside.of(scope, reads(step.body))
    return _run(work, outside, scope, anchor)


def run_recomputed_loop(step: Loop, scope: Scope, work: Work, anchor: Tensor) -> Tensor | None:
    """Run a loop whose bodies are recomputed, leave its Gives in the scope; a token if a backward will come."""
    keys = dict.fromkeys(key for body in step.bodies for key in reads(body))
    return _run(work, _Outside.of(scope, tuple(keys)), scope, anchor)


@dataclass
class _Outside:
    """What the bodies read: leaves, used as they are, and other tensors, which autograd hands to us and back."""

    leaves: list[tuple[Local, Tensor, Gradient]]
    names: list[Local]
    tensors: list[Tensor]

    @staticmethod
    def of(scope: Scope, keys: Sequence[str]) -> _Outside:
        found = _Outside([], [], [])
        for key in keys:
            for slot, tensor in scope.slots(key).items():
                local = Local(key, slot)
                sink = scope.sink(local)
                if sink is not None:
                    found.leaves.append((local, tensor, sink))
                else:
                    found.names.append(local)
                    found.tensors.append(tensor)
        return found

    def scope(self, tensors: Sequence[Tensor], sinks: Sequence[Gradient | None]) -> Scope:
        """A scope of its own with these tensors in place of the ones outside."""
        inner = Scope()
        for local, tensor, sink in self.leaves:
            inner.set(local, tensor, sink)
        for local, tensor, sink_ in zip(self.names, tensors, sinks, strict=True):
            inner.set(local, tensor, sink_)
        return inner


@dataclass
class _Call:
    """One run of a region: its work, what it reads beside autograd's inputs, and what came out."""

    work: Work
    leaves: _Outside
    ambient: Ambient
    made: list[Local]

    def needing(self, inputs: Sequence[bool]) -> set[str]:
        """The values inside that may need a gradient: an attention mask must not seem to."""
        found = {local.key for local, _, _ in self.leaves.leaves}
        found.update(local.key for local, needs in zip(self.leaves.names, inputs, strict=True) if needs)
        for body in self.work.bodies:
            add_needing(body, found)
        return found


def _run(work: Work, outside: _Outside, scope: Scope, anchor: Tensor) -> Tensor | None:
    tensors = outside.tensors
    call = _Call(work, _Outside(outside.leaves, outside.names, []), Ambient.here(), [])
    token = None
    if torch.is_grad_enabled():
        *results, token = _Recomputed.apply(call, anchor, *tensors)
    else:
        results = _forward(call, tensors)
    for local, tensor in zip(call.made, results, strict=True):
        scope.set(local, tensor)
    return token


@torch.no_grad()
def _forward(call: _Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The first run: no autograd, nothing kept."""
    work, gives = call.work, Gives()
    found: list[tuple[Local, Tensor]] = []
    detached = [tensor.detach() for tensor in tensors]
    for body in work.bodies:
        inner = Scope(call.leaves.scope(detached, [None] * len(detached)))
        work.run(body, inner, gives if work.gives else None, Tape(), False)
        found.extend((Local(key, slot), tensor) for key in work.outputs for slot, tensor in inner.slots(key).items())
    found.extend((Local(key), tensor) for key, tensor in gives.results(work.gives).items())
    call.made.extend(local for local, _ in found)
    return [tensor for _, tensor in found]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        # an output may be an input, or two outputs one tensor: each needs its own place in the autograd graph
        outputs = [tensor.detach() for tensor in _forward(call, tensors)]
        needing = call.needing(ctx.needs_input_grad[2:])
        ctx.mark_non_differentiable(
            *(tensor for local, tensor in zip(call.made, outputs, strict=True) if not _needs(local, tensor, needing))
        )
        return (*outputs, anchor.new_zeros(()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        wanted = ctx.needs_input_grad[2:]
        pairs = [
            make_leaf(tensor) if needs else (tensor.detach(), None)
            for tensor, needs in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        leaves, sinks = [leaf for leaf, _ in pairs], [sink for _, sink in pairs]
        arrived = {local: grad for local, grad in zip(call.made, gradients, strict=False) if grad is not None}
        for body in reversed(call.work.bodies):
            _replay(call, body, call.leaves.scope(leaves, sinks), arrived)
        return (None, None, *(None if sink is None else sink.total for sink in sinks))


def _needs(local: Local, tensor: Tensor, needing: set[str]) -> bool:
    return local.key in needing and (tensor.is_floating_point() or tensor.is_complex())


def _replay(call: _Call, body: Body, outside: Scope, arrived: dict[Local, Tensor]) -> None:
    """Run one body again, with autograd, and send the gradients of what it left through it."""
    tape = Tape()
    with call.ambient.entered(grad=True):
        roots, gradients = _rerun(call.work, body, outside, arrived, tape)
    # the scope is gone by now, so that backward frees what it has used
    backward(roots, gradients, tape)
    call.work.collect(tape)


def _rerun(
    work: Work, body: Body, outside: Scope, arrived: dict[Local, Tensor], tape: Tape
) -> tuple[list[Tensor], list[Tensor]]:
    inner, gives = Scope(outside), Gives(keep=True)
    work.run(body, inner, gives if work.gives else None, tape, True)
    pairs: list[tuple[Tensor, Tensor]] = []
    for local, gradient in arrived.items():
        if local.key in work.outputs:
            pairs.append((inner.tensor(local), gradient))
    for target, index, part in gives.parts():
        whole = arrived.get(Local(target))
        if whole is not None:
            pairs.append((part, whole if index is None else take(whole, index)))
    pairs = [(root, gradient) for root, gradient in pairs if root.requires_grad]
    return [root for root, _ in pairs], [gradient for _, gradient in pairs]


def backward(roots: list[Tensor], gradients: list[Tensor], tape: Tape) -> None:
    """Autograd's backward from the roots and, with zeros, from the tokens: every reshard is reached."""
    tokens = tape.tokens
    if roots or tokens:
        torch.autograd.backward([*roots, *tokens], [*gradients, *(torch.zeros_like(token) for token in tokens)])
    tokens.clear()

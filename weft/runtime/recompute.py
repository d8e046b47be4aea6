"""Recomputed functions and loops over chunks, for generated code.

In: a function of the module and the tensors it reads. Out: what it returns, or, of a loop, what its chunks give put
together. A recomputed one is a single autograd node: forward runs without autograd and keeps only what is read,
backward runs again, chunk by chunk from the last, sends the gradients through and forgets. The same semantics as
`runtime/regions.py`: leaves (parameters) are used as they are, every reshard inside is reached on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.runtime.context import Ambient
from weft.runtime.gives import Gives
from weft.runtime.script import Give, Index, Local
from weft.runtime.tape import Tape
from weft.runtime.transfers import take
from weft.runtime.values import Gradient


@dataclass(frozen=True)
class Given:
    """What becomes of one result of a chunk: added up, or placed at its chunk's index of a tensor of that shape."""

    at: tuple[Index, ...] | None = None
    shape: tuple[int, ...] = ()


class Owner(Protocol):
    """The module that runs the function: its tape is exchanged while it runs again."""

    tape: Tape
    stream: Any
    """What random functions draw from."""
    rerun_mode: AbstractContextManager[Any] | None
    """What it runs under when it runs again."""


@dataclass
class _Work:
    """A function, its arguments without the tensors that autograd hands over, and how often it runs."""

    owner: Owner
    function: Callable[..., Any]
    arguments: list[Any]
    """With a `_Hole` where a tensor goes in."""
    chunks: int | None
    """None: it runs once and returns its results themselves."""
    gives: tuple[Given, ...]
    plain: frozenset[int]
    """Positions of results that need no gradient."""
    ambient: Ambient
    stream: Any
    """Of the forward that this is part of: others may have run since when it runs again."""
    nested: list[int] = field(default_factory=list)
    """For each result how many tensors it has; 0 for a bare tensor. Known after the first run."""

    def call(self, tensors: Sequence[Tensor], chunk: int | None) -> list[Tensor]:
        """The results of one run, laid out flat."""
        filled = [_fill(argument, tensors) for argument in self.arguments]
        results = self.function(*filled) if chunk is None else self.function(chunk, *filled)
        found = (results,) if isinstance(results, Tensor) else tuple(results or ())
        self.nested = [0 if isinstance(one, Tensor) else len(one) for one in found]
        return [one for each in found for one in ((each,) if isinstance(each, Tensor) else each)]

    def is_plain(self, position: int) -> bool:
        """True if the tensor at a position of the flat results needs no gradient."""
        owners = [i for i, count in enumerate(self.nested) for _ in range(count or 1)]
        return owners[position] in self.plain

    def joined(self, flat: Sequence[Tensor]) -> list[Any]:
        """The results as the function returned them."""
        rest = iter(flat)
        return [tuple(itertools.islice(rest, count)) if count else next(rest) for count in self.nested]


@dataclass(frozen=True)
class _Hole:
    position: int


def _fill(argument: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(argument, _Hole):
        return tensors[argument.position]
    if isinstance(argument, tuple):
        return tuple(_fill(one, tensors) for one in argument)
    return argument


def _dig(argument: Any, tape: Tape, tensors: list[Tensor]) -> Any:
    """The argument with holes for tensors that are no leaves; these are appended to `tensors`."""
    if isinstance(argument, tuple):
        return tuple(_dig(one, tape, tensors) for one in argument)
    if not isinstance(argument, Tensor) or isinstance(argument, nn.Parameter) or tape.sink(argument) is not None:
        return argument
    tensors.append(argument)
    return _Hole(len(tensors) - 1)


def run(
    owner: Owner,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    anchor: Tensor,
    *,
    chunks: int | None = None,
    gives: Sequence[Given] = (),
    plain: Sequence[int] = (),
) -> Any:
    """Run a function now and again in backward; with `chunks` once for each."""
    tensors: list[Tensor] = []
    arguments = [_dig(argument, owner.tape, tensors) for argument in inputs]
    work = _Work(owner, function, arguments, chunks, tuple(gives), frozenset(plain), Ambient.here(), owner.stream)
    if not torch.is_grad_enabled():
        results = _forward(work, tensors)
    else:
        *results, token = _Recomputed.apply(work, anchor, *tensors)
        owner.tape.tokens.append(token)
    made = results if chunks is not None else work.joined(results)
    return made[0] if len(made) == 1 else tuple(made)


def run_chunks(function: Callable[..., Any], inputs: Sequence[Any], chunks: int, gives: Sequence[Given]) -> Any:
    """Run a function once for each chunk, under autograd, and put together what the chunks give."""
    found = Gives()
    for chunk in range(chunks):
        results = function(chunk, *inputs)
        _give(found, gives, (results,) if isinstance(results, Tensor) else results, chunk)
    placed = found.results(tuple(map(str, range(len(gives)))))
    out = tuple(placed[str(i)] for i in range(len(gives)))
    return out[0] if len(out) == 1 else out


def _give(found: Gives, gives: Sequence[Given], results: Sequence[Tensor], chunk: int) -> None:
    for i, (given, part) in enumerate(zip(gives, results, strict=True)):
        index = None if given.at is None else given.at[chunk]
        shape = tuple(part.shape) if given.at is None else given.shape
        found.give(Give(Local(""), str(i), index, shape), part)


@torch.no_grad()
def _forward(work: _Work, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The first run: no autograd, nothing kept."""
    detached = [tensor.detach() for tensor in tensors]
    outer, work.owner.tape = work.owner.tape, Tape()
    try:
        if work.chunks is None:
            return work.call(detached, None)
        found = Gives()
        for chunk in range(work.chunks):
            _give(found, work.gives, work.call(detached, chunk), chunk)
        placed = found.results(tuple(map(str, range(len(work.gives)))))
        return [placed[str(i)] for i in range(len(work.gives))]
    finally:
        work.owner.tape = outer


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.work = work
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        # a result may be an input, or two results one tensor: each needs its own place in the autograd graph
        results = [tensor.detach() for tensor in _forward(work, tensors)]
        ctx.mark_non_differentiable(
            *(
                tensor
                for i, tensor in enumerate(results)
                if work.is_plain(i) or not (tensor.is_floating_point() or tensor.is_complex())
            )
        )
        return (*results, anchor.new_zeros(()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        work: _Work = ctx.work
        tape = Tape()
        leaves: list[Tensor] = []
        sinks: list[Gradient | None] = []
        for tensor, needs in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True):
            leaf, sink = tape.leaf(tensor) if needs else (tensor.detach(), None)
            tape.inputs.add(id(leaf))
            leaves.append(leaf)
            sinks.append(sink)
        for chunk in [None] if work.chunks is None else reversed(range(work.chunks)):
            _replay(work, leaves, tape, chunk, gradients[:-1])
        return (None, None, *(None if sink is None else sink.total for sink in sinks))


def _replay(
    work: _Work, leaves: Sequence[Tensor], tape: Tape, chunk: int | None, gradients: Sequence[Tensor | None]
) -> None:
    """Run once more, with autograd, and send the gradients of the results through."""
    outer, now = work.owner.tape, work.owner.stream
    inner = work.owner.tape = Tape(sinks={**outer.sinks, **tape.sinks}, inputs=outer.inputs | tape.inputs)
    work.owner.stream = work.stream
    try:
        with work.ambient.entered(grad=True), work.owner.rerun_mode or nullcontext():
            pairs = _roots(work, leaves, chunk, gradients)
    finally:
        work.owner.tape, work.owner.stream = outer, now
    roots = [root for root, _ in pairs] + inner.tokens
    if roots:
        torch.autograd.backward(roots, [*(g for _, g in pairs), *(torch.zeros_like(token) for token in inner.tokens)])


def _roots(
    work: _Work, leaves: Sequence[Tensor], chunk: int | None, gradients: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    pairs = []
    for i, (root, gradient) in enumerate(zip(work.call(leaves, chunk), gradients, strict=True)):
        if gradient is not None and root.requires_grad:
            at = None if chunk is None else work.gives[i].at
            pairs.append((root, gradient if at is None or chunk is None else take(gradient, at[chunk])))
    return pairs

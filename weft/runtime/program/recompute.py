"""Recomputed functions and loops over chunks, for generated code.

In: a function of the module and the tensors it reads. Out: what it returns, or, of a loop, what its chunks give put
together. A recomputed one is a single autograd node: forward runs without autograd and keeps only what is read,
backward runs again, chunk by chunk from the last, sends the gradients through and forgets. Leaves (parameters) are used
as they are, every reshard inside is reached on every rank. A weight that was gathered is not kept either: it is
gathered again before the function runs again, for all chunks once, or chunk by chunk (`by_chunk.py`). A loop whose
results are those of the function that it stands in is not run when that runs again: only in backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.runtime.layout.execute import take
from weft.runtime.layout.transfer import Index
from weft.runtime.program.chunk_join import Given, join
from weft.runtime.program.context import Ambient
from weft.runtime.random import Stream
from weft.runtime.weights.gradient import Gradient
from weft.runtime.weights.tape import Tape
from weft.runtime.weights.unsharded import Use

if TYPE_CHECKING:
    from weft.runtime.program.module import ParallelModule


@dataclass
class _Work:
    """A function, its arguments without the tensors that autograd hands over, and how often it runs."""

    module: ParallelModule
    """Its tape is exchanged while the function runs again."""
    function: Callable[..., Any]
    arguments: list[Any]
    """With a `_Hole` where a tensor goes in."""
    chunks: int | None
    """None: it runs once and returns its results themselves."""
    gives: tuple[Given, ...]
    plain: frozenset[int]
    """Positions of results that need no gradient."""
    ambient: Ambient
    stream: Stream
    """Of the forward that this is part of: others may have run since when it runs again."""
    uses: dict[int, tuple[Use, Gradient]]
    """The gathered weights among its tensors: how to gather them again, and where their gradients go."""
    returned: bool = False
    """Its results are those of a recomputed function around it."""
    results: tuple[tuple[torch.Size, torch.dtype], ...] = ()
    """Their sizes and dtypes. Known after the first run."""
    nested: list[int] = field(default_factory=list)
    """For each result how many tensors it has; 0 for a bare tensor. Known after the first run."""

    def call(self, tensors: Mapping[int, Tensor], chunk: int | None) -> list[Tensor]:
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


class _Passing(Gradient):
    """Sums what the chunks of a loop give, and passes it on as one; what comes later is passed on at once."""

    def __init__(self, sink: Gradient) -> None:
        super().__init__()
        self._sink, self._open = sink, True

    def add(self, addend: Tensor) -> None:
        super().add(addend)
        self._pass()

    def add_at(self, index: Index, addend: Tensor, shape: torch.Size) -> None:
        super().add_at(index, addend, shape)
        self._pass()

    def close(self) -> None:
        """The last chunk has run."""
        self._open = False
        self._pass()

    def _pass(self) -> None:
        if not self._open and self.total is not None:
            total = self.total
            self.clear()
            self._sink.add(total)


def _fill(argument: Any, tensors: Mapping[int, Tensor]) -> Any:
    if isinstance(argument, _Hole):
        return tensors[argument.position]
    if isinstance(argument, tuple):
        return tuple(_fill(one, tensors) for one in argument)
    return argument


def _dig(argument: Any, tape: Tape, tensors: list[Tensor], uses: dict[int, tuple[Use, Gradient]]) -> Any:
    """The argument with holes for tensors that are no leaves, or gathered; these are appended to `tensors`."""
    if isinstance(argument, tuple):
        return tuple(_dig(one, tape, tensors, uses) for one in argument)
    if not isinstance(argument, Tensor) or isinstance(argument, nn.Parameter):
        return argument
    leaf = tape.known(argument)
    if leaf is not None and leaf.use is not None:
        uses[len(tensors)] = leaf.use, leaf.sink
    elif leaf is not None:
        return argument
    tensors.append(argument)
    return _Hole(len(tensors) - 1)


def run(
    module: ParallelModule,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    chunks: int | None = None,
    gives: Sequence[Given] = (),
    plain: Sequence[int] = (),
    returned: bool = False,
) -> Any:
    """Run a function now and again in backward; with `chunks` once for each.

    `returned`: its results are those of a recomputed function around it; where that runs again, this runs in backward
    only."""
    tensors: list[Tensor] = []
    uses: dict[int, tuple[Use, Gradient]] = {}
    arguments = [_dig(argument, module.tape, tensors, uses) for argument in inputs]
    for use, _ in reversed(uses.values()):
        # before it runs again they are gathered again, the first one first
        module.tape.gathered.need(use)
    here = Ambient.here(), module.stream
    work = _Work(module, function, arguments, chunks, tuple(gives), frozenset(plain), *here, uses, returned)
    if not torch.is_grad_enabled():
        results = _forward(work, tensors)
    else:
        *results, token = _Recomputed.apply(work, module.anchor, *tensors)
        module.tape.tokens.append(token)
        module.tape.reruns = True
    made = results if chunks is not None else work.joined(results)
    return made[0] if len(made) == 1 else tuple(made)


def run_chunks(function: Callable[..., Any], inputs: Sequence[Any], chunks: int, gives: Sequence[Given]) -> Any:
    """Run a function once for each chunk, under autograd, and put together what the chunks give."""

    def run_chunk(chunk: int) -> Sequence[Tensor]:
        results = function(chunk, *inputs)
        return (results,) if isinstance(results, Tensor) else results

    out = join(gives, chunks, run_chunk)
    return out[0] if len(out) == 1 else tuple(out)


@torch.no_grad()
def _forward(work: _Work, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The first run: no autograd, nothing kept."""
    outer = work.module.tape
    if work.returned and outer.results is not None:
        work.nested = [0] * len(outer.results)
        return [_unmade(size, dtype, work.module.device) for size, dtype in outer.results]
    detached = {at: tensor.detach() for at, tensor in enumerate(tensors)}
    work.module.tape = work.module.new_tape()
    try:
        if work.chunks is None:
            return work.call(detached, None)
        return join(work.gives, work.chunks, lambda chunk: work.call(detached, chunk))
    finally:
        work.module.tape = outer


def _unmade(size: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stands for a tensor whose content nobody reads; who does finds out."""
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(size)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.work = work
        ctx.save_for_backward(*(tensor for at, tensor in enumerate(tensors) if at not in work.uses))
        ctx.set_materialize_grads(False)
        # a result may be an input, or two results one tensor: each needs its own place in the autograd graph
        results = [tensor.detach() for tensor in _forward(work, tensors)]
        work.results = tuple((tensor.shape, tensor.dtype) for tensor in results)
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
        wanted: tuple[bool, ...] = ctx.needs_input_grad[2:]
        tape, leaves, sinks = work.module.new_tape(), dict[int, Tensor](), dict[int, Gradient]()
        saved = [at for at in range(len(wanted)) if at not in work.uses]
        for at, tensor in zip(saved, ctx.saved_tensors, strict=True):
            if wanted[at]:
                sinks[at] = Gradient()
                leaves[at] = tape.leaf(tensor, sinks[at], is_input=True)
            else:
                leaves[at] = tensor.detach()
        if work.chunks is None:
            _replay(work, leaves, tape, None, gradients[:-1])
        else:
            _replay_chunks(work, leaves, tape, work.chunks, gradients[:-1])
        # gradients of gathered weights went to their sinks
        return (None, None, *(sinks[at].total if at in sinks else None for at in range(len(wanted))))


def _replay_chunks(
    work: _Work, leaves: dict[int, Tensor], tape: Tape, chunks: int, gradients: Sequence[Tensor | None]
) -> None:
    """Run every chunk once more, the last one first."""
    sums = {at: _Passing(sink) for at, (_, sink) in work.uses.items()}
    leaves = leaves | _gathered(work, tape, sums)
    for chunk in reversed(range(chunks)):
        _replay(work, leaves, tape, chunk, gradients)
    leaves.clear()
    for one in sums.values():
        one.close()


def _gathered(work: _Work, tape: Tape, sinks: Mapping[int, Gradient]) -> dict[int, Tensor]:
    """The gathered weights, once more."""
    with torch.enable_grad():
        return {at: tape.edge(use, use.again(), sinks[at]) for at, (use, _) in work.uses.items()}


def _replay(
    work: _Work, leaves: Mapping[int, Tensor], tape: Tape, chunk: int | None, gradients: Sequence[Tensor | None]
) -> None:
    """Run once more, with autograd, and send the gradients of the results through."""
    module, inner = work.module, work.module.new_tape()
    outer, now = module.tape, module.stream
    inner.leaves.update({**outer.leaves, **tape.leaves})
    inner.results = work.results if chunk is None else None
    module.tape, module.stream = inner, work.stream
    try:
        with work.ambient.entered(grad=True), module.reading(), module.rerun_mode or nullcontext():
            pairs = _roots(work, leaves, chunk, gradients)
    finally:
        module.tape, module.stream = outer, now
    roots = [root for root, _ in pairs] + inner.tokens
    if roots:
        zeros = [torch.zeros_like(token) for token in inner.tokens]
        # leaves tell the tape what arrives: it must not hold the graph
        inner.tokens = []
        torch.autograd.backward(roots, [*(g for _, g in pairs), *zeros])


def _roots(
    work: _Work, leaves: Mapping[int, Tensor], chunk: int | None, gradients: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    if chunk is None:
        # nothing here holds them when backward begins: each goes when it has been used
        leaves = {**leaves, **_gathered(work, work.module.tape, {at: sink for at, (_, sink) in work.uses.items()})}
    pairs = []
    for i, (root, gradient) in enumerate(zip(work.call(leaves, chunk), gradients, strict=True)):
        if gradient is not None and root.requires_grad:
            at = None if chunk is None else work.gives[i].at
            pairs.append((root, gradient if at is None or chunk is None else take(gradient, at[chunk])))
    return pairs

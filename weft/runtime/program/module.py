"""ParallelModule: the base of generated programs, an `nn.Module` that holds one rank's share of a model.

In: a transport, and the rank's stored parts of parameters and buffers by their original dotted names. Parameters stand
in nested containers under those names (`self.model.h[0].attn.c_attn.weight`; whatever they are, none of them is an
attribute of the program itself), so that `parameters()` is what the optimizer updates here and `state_dict()` has the
original names. `forward` is generated; `loss.backward()` then leaves in each `.grad` the complete gradient of the
stored part, added to what was there. The gradients are reduced to their owners at the end of backward, in the reverse
order of use, by `grad_sync`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.errors import Refuse
from weft.runtime.checks.shard_tensor import plainly
from weft.runtime.layout.collectives import Collectives
from weft.runtime.layout.cuts import Cuts, index_at, whole
from weft.runtime.layout.inputs import brought
from weft.runtime.layout.transfer import Index
from weft.runtime.links.transport import Transport
from weft.runtime.program.chunk_join import Given, take_part
from weft.runtime.program.lines import ranged
from weft.runtime.program.parts import StoredParts
from weft.runtime.program.recompute import run, run_chunks
from weft.runtime.program.stored import NO_TABLES, Container, Part, Table, Tables
from weft.runtime.random import Draw, Stream
from weft.runtime.weights.as_seen import Samples
from weft.runtime.weights.buckets import Blocks
from weft.runtime.weights.ending import FROZEN, LiveOutputs, Outputs, entered, tied_loss, tied_outputs
from weft.runtime.weights.full_weights import FullWeights
from weft.runtime.weights.grad_sync import GradSync
from weft.runtime.weights.gradient import Gradient, give_gradient, is_retained
from weft.runtime.weights.leaf_aliases import Arrived, LeafAliases, is_watched
from weft.runtime.weights.precision import NO_SUMS
from weft.runtime.weights.prefetch import Prefetch
from weft.runtime.weights.tape import Tape, Used
from weft.runtime.weights.unshard import Gather
from weft.runtime.weights.unsharded import SAVED, change_values, changed_since, hooks_around

if TYPE_CHECKING:
    from weft.runtime.weights.masters import Masters

__all__ = ["Container", "Given", "ParallelModule", "Part", "Table", "Tables"]


T = TypeVar("T")


TWICE = (
    "backward goes through one forward of a parallel module a second time",
    "call the first backward(retain_graph=True), call the module again, or add the losses and call backward once",
)


class ParallelModule(StoredParts, grid={}, parameters={}):
    """One rank's share of a model.

    Args:
        state: the rank's stored parts by original name; zeros if not given.
        tables: what differs by rank.
        constants: tensors baked into the program.
    """

    def __init__(
        self,
        transport: Transport,
        state: Mapping[str, Tensor] | None = None,
        *,
        tables: Tables = NO_TABLES,
        constants: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(transport, tables)
        self.here, self.constants = SimpleNamespace(**tables.here), dict(constants or {})
        self.anchor = torch.zeros((), device=transport.device, requires_grad=True)
        self.stream, self.tape = Stream(0, 0, 0), self.new_tape()
        self.comm = Collectives(self, tables.moves)
        self.grad_sync = GradSync(self)
        self.full_weights = FullWeights(self.blocks)
        self.prefetch, self.prefetch_back = Prefetch(self.blocks), Prefetch(self.blocks)
        self._orders: dict[bool, list[Gather]] = {}
        self.samples = Samples()
        self._num_forwards = 0
        """Since the last backward."""
        self.masters: Masters | None = None
        """Of which its parameters are copies."""
        self.sums = NO_SUMS
        self.sinks: dict[str, Gradient] = {}
        self.draws: dict[Any, Draw] = {}
        """Random numbers that a forward has drawn."""
        self._backward: _Backward | None = None
        self.inputs_from: Mapping[int, Collection[int]] = {}
        """Inputs whose gradients come from some outputs only, and which."""
        self.live, self._live_now = LiveOutputs(self.trained_parts()), cast(Outputs, None)
        """Outputs that have a gradient with the parameters that are frozen now; in this call."""
        self.of_others = False
        """What arrives at its parameters is of another program that uses them too."""
        self.refusal: Refuse = lambda message, remedy: RuntimeError(f"{message}; {remedy}")
        """Makes the error for a wrong call."""
        self.after_backward: Callable[[Iterable[str]], None] | None = None
        """Is called when gradients are complete, with the names of those that came to other ranks only."""
        self.trace: Callable[[str, int, int, Tensor], None] = lambda op, output, slot, tensor: None
        """Is told what every op makes (name, output, slot, tensor), by programs that were generated to tell it."""
        self.rerun_mode: AbstractContextManager[Any] | None = None
        self.inner: LeafAliases | None = None
        """What stands for its parameters while it runs; None: they do themselves."""
        self._hooks: dict[str, RemovableHandle] = {}
        self.hold_parts(state)

    # Its parameters.

    @cached_property
    def blocks(self) -> Blocks | None:
        """Which of them travel together; None where that is decided by their bytes."""
        if not self.transport.by_block:
            return None
        return Blocks.among({name: prod(part.shape) * part.dtype.itemsize for name, part in self._stored.items()})

    def listen_to(self, name: str, parameter: Tensor) -> None:
        """What comes to a parameter is the program's own."""
        if self.inner is None:
            self._hooks[name] = parameter.register_post_accumulate_grad_hook(Arrived(self.arrived, name))

    def replaced(self) -> None:
        self._orders.clear()

    def read_apart(self) -> None:
        """From now on what comes to its parameters themselves is from outside: nobody sums it."""
        if self.inner is None:
            # one that is only used in another layout than it is stored in has leaves for each use
            places = {n: (n, *self._stored[n].tied) for n, _ in self.trained() if self._stored[n].sync is not None}
            self.inner = LeafAliases(self.model, places, self._names, self.arrived)
            for handle in self._hooks.values():
                handle.remove()
            self._hooks.clear()

    def shown(self) -> list[Tensor]:
        """The parameters that the caller sees, as far as nobody watches them."""
        if self.masters is not None:
            parameters = self.masters.shown()
        else:
            parameters = [] if self.inner is None else [parameter for _, parameter in self.trained()]
        return [one for one in parameters if one.requires_grad and not is_watched(one)]

    def reading(self) -> AbstractContextManager[Any]:
        """What the program runs under, and runs again under in backward."""
        return nullcontext() if self.inner is None else self.inner.reading()

    @torch.no_grad()
    def share(self, source: ParallelModule) -> None:
        """Use the weights of another program: the very same parameters, so that their gradients are too."""
        self.full_weights, self.masters, self.sums = source.full_weights, source.masters, source.sums
        if source.inner is not None:
            self.read_apart()
        for name in self.stored:
            held = source.part(name)
            if isinstance(held, nn.Parameter):
                self.adopt(name, held)
            elif held is not None:
                self.update(name, held)

    # What forward needs.

    def new_tape(self) -> Tape:
        """For a forward, or for a function that runs again."""
        return Tape(self.anchor, self.used, marks=self.transport.by_block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tape = self.tape = self.new_tape()
        if self.rerun_mode is None:
            self._begin_turn()
        self._num_forwards += torch.is_grad_enabled()
        self.prefetch.begin(self._gathers(keeps=False))
        # without a graph nothing comes to leaves: parameters are read themselves, wherever they lie by now
        reading: AbstractContextManager[Any] = nullcontext()
        if self.inner is not None and torch.is_grad_enabled():
            self.inner.begin(self._parts)
            reading = self.reading()
        hooks = hooks_around() if torch.is_grad_enabled() else None
        inputs = brought(args, self.device, type(self).forward)
        self._live_now, tape.frozen = self.live.now(inputs, self.inputs_from), self.live.frozen
        if self.inputs_from:
            inputs = tuple(entered(x, tape, self.inputs_from.get(at)) for at, x in enumerate(inputs))
        try:
            with reading, self.grad_sync.watching(), ranged(self, self.model):
                found = super().__call__(*inputs, **kwargs)
        finally:
            tape.gathered.close()
        if hooks is not None and (tape.reruns or tape.gathered.is_used) and change_values(hooks):
            raise self.refusal(*SAVED)
        return found

    def _begin_turn(self) -> None:
        """Weights may be others than before."""
        self.full_weights.begin(self._gathers(keeps=True))
        if self.masters is not None:
            self.masters.refresh()

    def _gathers(self, *, keeps: bool) -> list[Gather]:
        """How the weights come that are stored in shards, in the order of use: those that are kept, or the others."""
        if keeps not in self._orders:
            found = self._orders[keeps] = [
                self.comm.gather(name, part.use)
                for name, part in self._stored.items()
                if part.use and self.keeps(name) == keeps and name in self._parts
            ]
            by_group: dict[tuple[int, ...], list[Tensor]] = {}
            for one in found if not keeps else ():
                by_group.setdefault(one.key[0], []).append(one.stored)
            for group, shards in by_group.items():
                self.transport.lay(shards, group)
        return self._orders[keeps]

    def draw(self, number: int, shape: tuple[int, ...], at: Cuts | Index | None = None) -> dict[str, Any]:
        """This rank's elements of a random draw: arguments of a random function.

        Args:
            number: how many draws came before it in the forward.
            shape: of the whole draw.
            at: how it is cut, or the intervals wanted here.
        """
        key = number, shape, tuple(at.items()) if isinstance(at, Mapping) else at
        if key not in self.draws:
            index = index_at(shape, at, self.place) if isinstance(at, Mapping) else at
            self.draws[key] = Draw(number, shape, whole(shape) if index is None else index)
        return {"draw": self.draws[key], "stream": self.stream}

    def take(self, x: Tensor, index: Index | None, shape: tuple[int, ...] = ()) -> Tensor:
        """A chunk's part of a tensor; zeros of that shape if it has none."""
        return x.new_zeros(shape) if index is None else take_part(x, index, self.tape.known(x))

    def sized(self, key: str, *sizes: int) -> Any:
        """What differs by rank, at sizes of the batch."""
        return self._at_sizes("here", key, sizes)

    def sized_move(self, key: str, *sizes: int) -> str:
        """The key of a change of layout at sizes of the batch."""
        return self.comm.know(f"{key} at {', '.join(map(str, sizes))}", self._at_sizes("moves", key, sizes))

    def _at_sizes(self, section: str, key: str, sizes: tuple[int, ...]) -> Any:
        assert self._tables.sized is not None, f"no table of this program depends on sizes: {key}"
        return self._tables.sized.at(section, key, sizes)

    def recompute(self, function: Callable[..., T], *inputs: Any, plain: Sequence[int] = ()) -> T:
        """Run a function without keeping what is inside it; run it again in backward.

        `plain`: positions of results that need no gradient."""
        return cast(T, run(self, function, inputs, plain=plain))

    def chunks(
        self,
        count: int,
        function: Callable[..., T],
        *inputs: Any,
        gives: Sequence[Given],
        recompute: bool = False,
        returned: bool = False,
    ) -> T:
        """Run `function(chunk, *inputs)` for every chunk and put together what the chunks give.

        Args:
            recompute: keep nothing of a chunk but what it reads, and run it again in backward.
            returned: a recomputed function returns the results, and nothing else reads them: where that runs again they
                are not made.
        """
        if recompute:
            return cast(T, run(self, function, inputs, chunks=count, gives=gives, returned=returned))
        return cast(T, run_chunks(function, inputs, count, gives))

    def finish(self, value: Tensor, *roots: Tensor) -> Tensor:
        """The loss, tied to all that this forward has done: backward starts from the roots and reaches every reshard.

        Args:
            value: the complete loss, on every rank.
            roots: what this rank holds of it where it was made.
        """
        tape, self.tape = self.tape, self.new_tape()
        if not torch.is_grad_enabled() or self._live_now == frozenset():
            return value.detach()
        return tied_loss(self, tape, value, roots)

    @overload
    def outputs(self, value: Tensor, /) -> Tensor: ...

    @overload
    def outputs(self, first: Tensor, second: Tensor, /, *more: Tensor) -> tuple[Tensor, ...]: ...

    def outputs(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What the model returns, complete on every rank, tied to all that this forward has done: backward starts from
        the gradients that the caller has for them, the same on every rank."""
        tape, self.tape = self.tape, self.new_tape()
        if torch.is_grad_enabled():
            found = tied_outputs(self, tape, values, self._live_now)
        else:
            found = tuple(value.detach() for value in values)
        return found[0] if len(found) == 1 else found

    # What backward needs.

    def unwatched(self, parameter: Tensor) -> str | None:
        """The name of a trained parameter, if nobody else waits for autograd to come to it."""
        name = self._names.get(id(parameter))
        return None if name is None or is_watched(self._parts[name]) else name

    def arrived(self, name: str, parameter: Tensor) -> None:
        """Autograd has come to a parameter that is used as it is stored."""
        if self._backward is not None and not self.of_others:
            self.sinks.setdefault(name, Gradient(dtype=self.sums.added(parameter.dtype))).collect(parameter)
            self.grad_sync.arrived(name)

    def used(self, use: Used) -> None:
        """Something has been added to the gradient of a use in another layout, or backward has passed it."""
        if self._backward is not None:
            self.grad_sync.uses.hear(use)

    @property
    def holds_gradients(self) -> bool:
        """True while gradients of several backwards are added up, some of which may be put off."""
        return self.rerun_mode is not None

    @plainly
    def begin_backward(self, tape: Tape) -> None:
        """Called by the first node of backward: what is in `.grad` is set aside, a callback comes after the last."""
        if tape.spent:
            raise self.refusal(*TWICE)
        if (name := tape.changed()) is not None:
            error = self.refusal(*changed_since(name))
            # a rank that holds nothing of it has seen nothing
            self.transport.job.raised(error)
            raise error
        if tape.reruns and (other := tape.frozen ^ self.live.frozen):
            raise self.refusal(f"{min(other)} {FROZEN[0]}", FROZEN[1])
        if self.masters is not None and self.live.frozen:
            self.masters.freeze_copies()
        tape.begin(spent=not is_retained())
        self.prefetch_back.begin(tape.gathered.again())
        if self._backward is None:
            self._backward = self._begun(alone=self._num_forwards == 1)
            for name, parameter in self.trained():
                if parameter.grad is not None:
                    self._backward.before[name], parameter.grad = parameter.grad, None
            if self.rerun_mode is None:
                # autograd alone holds it: one that goes without having been called was left by an error
                end = partial(self._end_backward)
                self._backward.end = weakref.ref(end, partial(_left, weakref.ref(self), self._backward))
                torch.autograd.Variable._execution_engine.queue_callback(end)
        self._backward.tapes.append(tape)
        self.grad_sync.uses.enter(tape)

    def leave_backward(self) -> None:
        """Forget a backward that was left by an error: gradients are those from before it."""
        backward, self._backward, self.rerun_mode = self._backward, None, None
        self.sinks.clear()
        for name, parameter in self.trained() if backward is not None else ():
            if backward is not None and name in backward.before:
                before, outside = backward.before[name], parameter.grad
                parameter.grad = before if outside is None else before.add_(outside)

    def _begun(self, *, alone: bool) -> _Backward:
        self.sinks.clear()
        self.grad_sync.begin(alone=alone)
        return _Backward({}, [])

    def hold_gradients(self, mode: AbstractContextManager[Any]) -> None:
        """From now on backward does not complete gradients: more will come (`grad_accumulation.py`).

        Args:
            mode: what is recomputed in backward runs under it.
        """
        if self.rerun_mode is None:
            # a step begins
            self._begin_turn()
        self.rerun_mode = mode

    def complete_gradients(self, *, anyway: bool = False) -> None:
        """All gradients have come: complete them; `anyway`: with zeros if none did, because other replicas wait."""
        self.rerun_mode = None
        if self._backward is None and anyway:
            self._backward = self._begun(alone=False)
        if self._backward is not None:
            self._end_backward()

    @plainly
    def _end_backward(self) -> None:
        assert self._backward is not None
        backward, self._backward = self._backward, None
        self._num_forwards = 0
        found = self.grad_sync.end(backward.tapes)
        if self.inner is not None and any(tape.used for tape in backward.tapes):
            # what is gathered may have been laid elsewhere, and nothing is to hold what it had
            self.inner.refresh(self._parts)
        for name, parameter in self.trained():
            before, gradient = (
                backward.before.get(name),
                found.get(name) if backward.reaches(name, self._stored[name]) else None,
            )
            if not parameter.requires_grad:
                # frozen for the time being: as in eager, nothing is added
                parameter.grad = before
                continue
            # with inner leaves: what came from outside, besides
            outside = parameter.grad
            for addend in (gradient, outside):
                if before is not None and addend is not None:
                    before.add_(addend)
                elif addend is not None:
                    before = addend
            give_gradient(parameter, before)
        self.sinks.clear()
        if self.masters is not None and self.masters.at_once:
            self.masters.collect()
        if self.after_backward is not None:
            missing = ((name, part) for name, part in self._stored.items() if name not in self._parts)
            self.after_backward([name for name, part in missing if part.trained and backward.reaches(name, part)])


@dataclass
class _Backward:
    """A backward that is going on: the gradients from before it, and the tapes of the forwards it goes through."""

    before: dict[str, Tensor]
    tapes: list[Tape]
    end: weakref.ref[Any] | None = None
    """What autograd calls at its end."""

    def reaches(self, name: str, part: Part) -> bool:
        """True if a parameter has a gradient of what the caller uses; where no batch came, others have used it."""
        some, tapes = part.reached_from, [one for one in self.tapes if name not in one.frozen]
        return not self.tapes or any(some is None or not one.outputs.isdisjoint(some) for one in tapes)


def _left(module: weakref.ref[ParallelModule], backward: _Backward, end: object) -> None:
    """Autograd has let go of the end of a backward: if it did not come to it, forget it."""
    found = module()
    if found is not None and found._backward is backward:
        found.leave_backward()

"""The interpreter of Scripts: one rank's forward, backward, gradient syncs.

Enters: a Script, a Transport, the rank's stored parts of parameters, buffers and constants; then, step by step, its
parts of the inputs and the random stream. Leaves: outputs, gradients of the stored parts of parameters, new contents
of buffers. Promised: instructions run in Script order; backward is autograd's, entered by every rank from the loss and
from the tokens of its reshards; syncs run after it in Script order; values die when the Script frees them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.runtime.calls import resolve
from weft.runtime.end_sync import separate
from weft.runtime.gives import Gives, take_part
from weft.runtime.random import Draw, Stream
from weft.runtime.regions import Body, Work, backward, run_recomputed_loop, run_region
from weft.runtime.reshard import run_reshard
from weft.runtime.script import (
    Free,
    Give,
    Instruction,
    Load,
    Local,
    Loop,
    Peers,
    Region,
    Reshard,
    Run,
    Script,
    Sync,
    Take,
)
from weft.runtime.tape import tie
from weft.runtime.transfers import execute_all, real_dtype, size
from weft.runtime.transport import Doing, GroupComm, Transport
from weft.runtime.values import Gradient, Scope, Tape, make_leaf

Trace = Callable[[str, int, int, Tensor], None]
"""Called with op name, output index, slot and tensor whenever an op has run (not when it runs again in backward)."""


class Rank:
    """One rank's run of a Script, step after step.

    Args:
        state: the stored parts of parameters, buffers and constants, by tensor name.
        dtypes: of stored tensors that this rank uses without holding a part of them, where no peer's message tells.
        trace: sees what every op makes.
    """

    def __init__(
        self,
        script: Script,
        transport: Transport,
        *,
        state: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype] | None = None,
        trace: Trace | None = None,
    ) -> None:
        assert script.rank == transport.rank and script.num_ranks == transport.num_ranks, (
            f"the script is for rank {script.rank} of {script.num_ranks}, "
            f"the transport for rank {transport.rank} of {transport.num_ranks}"
        )
        self._script, self._transport, self._trace = script, transport, trace
        self._state = state
        self._dtypes = {**{sync.parameter: sync.dtype for sync in script.syncs}, **(dtypes or {})}
        self._machine: _Machine | None = None
        self._tape = Tape()
        self._loss: list[Tensor] = []
        self._updates: dict[str, Tensor] = {}

    def forward(self, inputs: Mapping[str, Tensor], stream: Stream) -> dict[str, Tensor]:
        """Run the instructions. Inputs are the rank's parts of them; so are the outputs."""
        stored = {**self._state, **inputs}
        for name, index in self._script.stored.items():
            assert name in stored, f"rank {self._script.rank} was not given its part of {name}"
            found, planned = tuple(stored[name].shape), size(index)
            assert found == planned, f"rank {self._script.rank}: part of {name} has shape {found}, planned {planned}"
        self._tape = Tape()
        self._machine = _Machine(self._transport, stored, self._dtypes, stream, self._trace)
        scope = Scope()
        self._machine.run(self._script.instructions, scope, None, self._tape, False)
        self._loss = [] if self._script.loss is None else list(scope.slots(self._script.loss).values())
        self._updates = {name: scope.tensor(Local(key)).detach() for name, key in self._script.updates.items()}
        return {name: scope.tensor(Local(key)).detach() for name, key in self._script.outputs.items()}

    def backward(self) -> dict[str, Tensor]:
        """Backward of the last forward, then the syncs: the gradient of the stored part of each parameter."""
        assert self._machine is not None, "backward comes after forward, once"
        machine, self._machine = self._machine, None
        roots, self._loss = [loss for loss in self._loss if loss.requires_grad], []
        self._transport.doing = Doing("backward")
        backward(roots, [torch.ones_like(root) for root in roots], self._tape)
        machine.collect(self._tape)
        found: dict[str, Tensor] = {}
        for sync in self._script.syncs:
            gradient = machine.sync(sync)
            if gradient is not None:
                found[sync.parameter] = gradient
        self._transport.doing = Doing()
        return separate(found)

    def updates(self) -> dict[str, Tensor]:
        """New contents of the buffers that the last forward updated: this rank's parts."""
        return dict(self._updates)


class _Machine:
    """What instructions need beside the values: the transport, what is stored, the stream, the sums of gradients."""

    def __init__(
        self,
        transport: Transport,
        stored: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        stream: Stream,
        trace: Trace | None,
    ) -> None:
        self._transport, self._stored, self._dtypes = transport, stored, dtypes
        self._stream, self._trace = stream, trace
        self._anchor = torch.zeros((), device=transport.device, requires_grad=True)
        self._calls: dict[str, Callable[..., Any]] = {}
        self._gradients: dict[Local, Gradient] = {}

    def run(self, body: Body, scope: Scope, gives: Gives | None, tape: Tape, again: bool) -> None:
        """Run instructions in order. `again`: in backward, for their autograd graph only."""
        for step in body:
            match step:
                case Run():
                    self._call(step, scope, tape, again)
                case Give():
                    assert gives is not None, f"Give of {step.target} outside a loop"
                    gives.give(step, scope.tensor(step.source))
                case Free():
                    for key in step.keys:
                        scope.forget(key)
                case _:
                    token = self._make(step, scope, tape, again)
                    if token is not None:
                        tape.tokens.append(token)

    def _make(self, step: Instruction, scope: Scope, tape: Tape, again: bool) -> Tensor | None:
        """Run an instruction that makes values; a token if backward must reach it."""
        match step:
            case Load():
                self._load(step, scope, tape)
            case Take():
                scope.set(step.target, self._take(step, scope))
            case Reshard():
                results, token = run_reshard(
                    step, list(scope.slots(step.source).values()), self._transport, self._anchor
                )
                for slot, tensor in enumerate(results):
                    scope.set(Local(step.target, slot), tensor)
                return token
            case Region():
                return run_region(step, scope, self._work((step.body,), step.outputs, (), again), self._anchor)
            case Loop(recompute=True):
                return run_recomputed_loop(step, scope, self._work(step.bodies, (), step.gives, again), self._anchor)
            case Loop():
                self._loop(step, scope, tape, again)
            case _:
                raise AssertionError(f"{type(step).__name__} cannot stand among the instructions")
        return None

    def _work(self, bodies: tuple[Body, ...], outputs: tuple[str, ...], gives: tuple[str, ...], again: bool) -> Work:
        def run(body: Body, scope: Scope, gives: Gives | None, tape: Tape, replay: bool) -> None:
            self.run(body, scope, gives, tape, again or replay)

        return Work(bodies, outputs, gives, run, self.collect)

    def _loop(self, step: Loop, scope: Scope, tape: Tape, again: bool) -> None:
        gives = Gives()
        for body in step.bodies:
            self.run(body, Scope(scope), gives, tape, again)
        for key, tensor in gives.results(step.gives).items():
            scope.set(Local(key), tensor)

    def _load(self, step: Load, scope: Scope, tape: Tape) -> None:
        self._transport.doing = Doing(f"load of {step.tensor}", step.place)
        sources = [self._stored[step.tensor]] if step.tensor in self._stored else []
        parts = execute_all(step.transfers, sources, self._transport, dtype=self._dtypes.get(step.tensor))
        for slot, part in enumerate(parts):
            local = Local(step.key, slot)
            if step.leaf and torch.is_grad_enabled():
                leaf, sink = make_leaf(part)
                tape.leaves.append((local, sink))
                scope.set(local, leaf, sink)
            else:
                scope.set(local, part.detach())

    def _take(self, step: Take, scope: Scope) -> Tensor:
        source = Local(step.source)
        whole = scope.tensor(source)
        if step.index is None:
            return whole.new_zeros(step.shape)
        return take_part(whole, step.index, scope.sink(source))

    def _call(self, step: Run, scope: Scope, tape: Tape, again: bool) -> None:
        self._transport.doing = Doing(step.op, step.place)
        bound = _Bound(scope, self._transport)
        args = [bound.argument(value) for value in step.args]
        kwargs = {name: bound.argument(value) for name, value in step.kwargs}
        if bound.random:
            kwargs["stream"] = self._stream
        function = step.function if step.function is not None else self._resolve(step.target)
        with nullcontext() if step.grad else torch.no_grad(), _autocast(step):
            result = function(*args, **kwargs)
        results = [result] if isinstance(result, Tensor) else list(result)
        assert len(results) == len(step.outputs), f"{step.op} made {len(results)} tensors, planned {len(step.outputs)}"
        if bound.talks:
            results = tie(results, tape.tokens)
        for index, (local, tensor) in enumerate(zip(step.outputs, results, strict=True)):
            scope.set(local, tensor)
            if self._trace is not None and not again:
                self._trace(step.op, index, local.slot, tensor.detach())

    def _resolve(self, target: str) -> Callable[..., Any]:
        if target not in self._calls:
            self._calls[target] = resolve(target)
        return self._calls[target]

    def collect(self, tape: Tape) -> None:
        """Add the gradients of the leaves on the tape to the sums per leaf name."""
        for local, sink in tape.leaves:
            if sink.total is not None:
                self._gradients.setdefault(local, Gradient()).add(sink.total)
        tape.leaves.clear()

    def sync(self, step: Sync) -> Tensor | None:
        """The gradient of the stored part of a parameter; None if this rank stores nothing of it, or nobody uses it."""
        self._transport.doing = Doing(f"gradient sync of {step.parameter}")
        total = Gradient()
        for key, shapes, transfers in zip(step.sources, step.source_shapes, step.transfers, strict=True):
            parts = [self._gradient_of(Local(key, slot), shape, step.dtype) for slot, shape in enumerate(shapes)]
            results = execute_all(transfers, parts, self._transport, dtype=step.dtype)
            planned = [] if step.shape is None else [step.shape]
            found = [tuple(result.shape) for result in results]
            assert found == planned, f"gradient of {step.parameter} is {found}, planned as {planned}"
            for result in results:
                total.add(result)
        return total.total

    def _gradient_of(self, local: Local, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        sink = self._gradients.pop(local, None)
        if sink is None or sink.total is None:
            return torch.zeros(shape, dtype=real_dtype(dtype), device=self._transport.device)
        assert tuple(sink.total.shape) == shape, f"gradient of {local.key} is {sink.total.shape}, planned as {shape}"
        return sink.total


class _Bound:
    """Puts tensors and communicators in place of what stands for them in a Run's arguments."""

    def __init__(self, scope: Scope, transport: Transport) -> None:
        self._scope, self._transport = scope, transport
        self.random = self.talks = False

    def argument(self, value: Any) -> Any:
        match value:
            case Local():
                return self._scope.tensor(value)
            case Peers():
                self.talks = True
                return GroupComm(self._transport, value.ranks)
            case Draw():
                self.random = True
                return value
            case tuple():
                return tuple(self.argument(one) for one in value)
            case list():
                return [self.argument(one) for one in value]
            case _:
                return value


def _autocast(step: Run) -> torch.autocast | nullcontext[None]:
    if step.autocast is None:
        return nullcontext()
    device, dtype, enabled = step.autocast
    return torch.autocast(device, dtype=dtype, enabled=enabled)

"""ParallelModule: the base of generated programs, an `nn.Module` that holds one rank's share of a model.

In: a transport, and the rank's stored parts of parameters and buffers by their original dotted names. Parameters stand
in nested containers under those names (`self.h[0].attn.c_attn.weight`), so that `parameters()` is what the optimizer
updates here and `state_dict()` has the original names. `forward` is generated; `loss.backward()` then leaves in each
`.grad` the complete gradient of the stored part, added to what was there. The gradients are brought home at the end of
backward, in the reverse order of use, by `grad_sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.runtime.collectives import Collectives
from weft.runtime.cuts import Cuts, Place, index_at, whole
from weft.runtime.gives import take_part
from weft.runtime.moves import Move, all_reduce
from weft.runtime.random import Draw, Stream
from weft.runtime.recompute import Given, run, run_chunks
from weft.runtime.script import Index, Transfer
from weft.runtime.stored import NO_TABLES, Container, Part, Table, Tables, expand
from weft.runtime.tape import Tape, Used
from weft.runtime.transfers import execute_all, real_dtype, size
from weft.runtime.transport import Doing, Transport
from weft.runtime.values import Gradient

__all__ = ["Container", "EndSync", "Given", "GradSync", "ParallelModule", "Part", "Table", "Tables", "separate"]


class GradSync(Protocol):
    """Makes gradients complete. Called on every rank in the same order."""

    def begin(self, module: ParallelModule) -> None:
        """A backward begins."""
        ...

    def arrived(self, module: ParallelModule, name: str) -> None:
        """Autograd has added to the gradient of a parameter used as stored (`module.sinks[name]`)."""
        ...

    def end(self, module: ParallelModule, tapes: Sequence[Tape]) -> Mapping[str, Tensor]:
        """Backward is over: the complete gradients of what the rank stores."""
        ...


class ParallelModule(Container):
    """One rank's share of a model.

    Args:
        state: the rank's stored parts by original name; zeros if not given.
        tables: what differs by rank.
        constants: tensors baked into the program.
    """

    _grid: ClassVar[Mapping[str, int]] = {}
    _stored: ClassVar[Mapping[str, Part]] = {}
    _buffered: ClassVar[Mapping[str, Part]] = {}

    def __init_subclass__(
        cls,
        *,
        grid: Mapping[str, int],
        parameters: Mapping[str, Part],
        buffers: Mapping[str, Part] | None = None,
        layers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init_subclass__()
        cls._grid = grid
        cls._stored = dict(expand(parameters, layers or {}))
        cls._buffered = dict(expand(buffers or {}, layers or {}))

    def __init__(
        self,
        transport: Transport,
        state: Mapping[str, Tensor] | None = None,
        *,
        tables: Tables = NO_TABLES,
        constants: Mapping[str, Tensor] | None = None,
        grad_sync: GradSync | None = None,
    ) -> None:
        super().__init__()
        self.transport, self.device = transport, transport.device
        self.place = Place(tuple(self._grid.items()), transport.rank)
        self.here, self.constants = SimpleNamespace(**tables.here), dict(constants or {})
        self.stream, self.tape = Stream(0, 0, 0), Tape()
        self._anchor = torch.zeros((), device=transport.device, requires_grad=True)
        self._tables = tables
        self.comm = Collectives(transport, self.place, tables.moves, self, self._anchor)
        self.grad_sync: GradSync = grad_sync or EndSync()
        self.sinks: dict[str, Gradient] = {}
        self.stored: dict[str, Index] = {}
        """What this rank holds of each parameter and buffer, by every name."""
        self._parts: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._draws: dict[Any, Draw] = {}
        self._backward: _Backward | None = None
        for name, part in self._stored.items():
            self._hold(name, part, state, trained=True)
        for name, part in self._buffered.items():
            self._hold(name, part, state, trained=False)

    @classmethod
    def grid(cls) -> Mapping[str, int]:
        """The axes of the grid and their sizes."""
        return cls._grid

    # What is stored.

    def _hold(self, name: str, part: Part, state: Mapping[str, Tensor] | None, *, trained: bool) -> None:
        index = self._index(part)
        if index is None:
            return
        shape = size(index)
        if state is not None and name in state:
            tensor = state[name].detach().to(self.device)
            assert tuple(tensor.shape) == shape, f"the part of {name} has shape {tuple(tensor.shape)}, planned {shape}"
        else:
            tensor = torch.zeros(shape, dtype=part.dtype, device=self.device)
        if trained:
            tensor = nn.Parameter(tensor, requires_grad=part.trained)
            self._names[id(tensor)] = name
            if part.trained:
                tensor.register_post_accumulate_grad_hook(self._arrived(name))
        self._parts[name] = tensor
        for each in (name, *part.tied):
            self.stored[each] = index
            self.hold(each, tensor, persistent=part.persistent)

    def _index(self, part: Part) -> Index | None:
        if isinstance(part.cuts, Table):
            return self._tables.parts[part.cuts.key]
        return index_at(part.shape, part.cuts or {}, self.place)

    def part(self, name: str) -> Any:
        """What the rank stores under a name; None if nothing."""
        held = self._parts.get(name)
        if held is None or isinstance(held, nn.Parameter):
            return held
        *way, last = name.split(".")
        return self.get_submodule(".".join(way))._buffers[last]

    def name_of(self, parameter: Tensor) -> str:
        """The name of a parameter."""
        return self._names[id(parameter)]

    def update(self, name: str, value: Tensor) -> None:
        """A buffer's new content."""
        for each in (name, *self._buffered[name].tied):
            *way, last = each.split(".")
            self.get_submodule(".".join(way))._buffers[last] = value.detach()

    # What forward needs.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.tape = Tape()
        return super().__call__(*args, **kwargs)

    def draw(self, number: int, shape: tuple[int, ...], at: Cuts | Index | None = None) -> dict[str, Any]:
        """This rank's elements of a random draw: arguments of a random function.

        Args:
            number: how many draws came before it in the forward.
            shape: of the whole draw.
            at: how it is cut, or the intervals wanted here.
        """
        key = number, shape, tuple(at.items()) if isinstance(at, Mapping) else at
        if key not in self._draws:
            index = index_at(shape, at, self.place) if isinstance(at, Mapping) else at
            self._draws[key] = Draw(number, shape, whole(shape) if index is None else index)
        return {"draw": self._draws[key], "stream": self.stream}

    def take(self, x: Tensor, index: Index | None, shape: tuple[int, ...] = ()) -> Tensor:
        """A chunk's part of a tensor; zeros of that shape if it has none."""
        return x.new_zeros(shape) if index is None else take_part(x, index, self.tape.sink(x))

    def recompute(self, function: Callable[..., Any], *inputs: Any, plain: Sequence[int] = ()) -> Any:
        """Run a function without keeping what is inside it; run it again in backward.

        `plain`: positions of results that need no gradient."""
        return run(self, function, inputs, self._anchor, plain=plain)

    def chunks(
        self, count: int, function: Callable[..., Any], *inputs: Any, gives: Sequence[Given], recompute: bool = False
    ) -> Any:
        """Run `function(chunk, *inputs)` for every chunk and put together what the chunks give.

        `recompute`: keep nothing of a chunk but what it reads, and run it again in backward."""
        if recompute:
            return run(self, function, inputs, self._anchor, chunks=count, gives=gives)
        return run_chunks(function, inputs, count, gives)

    def finish(self, value: Tensor, *roots: Tensor) -> Tensor:
        """The loss, tied to all that this forward has done: backward starts from the roots and reaches every reshard.

        Args:
            value: the complete loss, on every rank.
            roots: what this rank holds of it where it was made.
        """
        tape, self.tape = self.tape, Tape()
        if not torch.is_grad_enabled():
            return value.detach()
        live = [root for root in roots if root.requires_grad]
        loss: Tensor = _Finish.apply(self, tape, len(live), self._anchor, value.detach(), *live, *tape.tokens)
        return loss

    # What backward needs.

    def _arrived(self, name: str) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if self._backward is not None:
                self.sinks.setdefault(name, Gradient()).collect(parameter)
                self.grad_sync.arrived(self, name)

        return arrived

    def begin_backward(self, tape: Tape) -> None:
        """Called by the first node of backward: what is in `.grad` is set aside, a callback comes after the last."""
        if self._backward is None:
            self._backward = _Backward({}, [])
            for name, parameter in self.trained():
                if parameter.grad is not None:
                    self._backward.before[name], parameter.grad = parameter.grad, None
            self.sinks.clear()
            self.grad_sync.begin(self)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._backward.tapes.append(tape)

    def _end_backward(self) -> None:
        assert self._backward is not None
        backward, self._backward = self._backward, None
        found = self.grad_sync.end(self, backward.tapes)
        for name, parameter in self.trained():
            before, gradient = backward.before.get(name), found.get(name)
            if before is not None and gradient is not None:
                before.add_(gradient)
            parameter.grad = gradient if before is None else before
        self.sinks.clear()

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters that this rank stores a part of, in the order of use."""
        for name, part in self._stored.items():
            held = self._parts.get(name)
            if part.trained and isinstance(held, nn.Parameter):
                yield name, held

    def sync_order(self) -> Iterator[tuple[str, Part]]:
        """All trained parameters, as their gradients become complete: in the reverse order of use."""
        return ((name, self._stored[name]) for name in reversed(list(self._stored)) if self._stored[name].trained)

    def sync_transfers(self, name: str) -> tuple[Transfer, ...] | None:
        """How the gradient of a parameter used as stored becomes complete; None if it is not used so."""
        part = self._stored[name]
        if part.sync is None or name not in self._parts:
            return None
        if isinstance(part.sync, Table):
            return self._tables.moves[part.sync.key].forward
        axes = isinstance(part.sync, str) or any(isinstance(one, str) for one in part.sync)
        moves = [all_reduce(part.sync)] if axes and part.sync else part.sync  # type: ignore[arg-type]
        shape, found = tuple(self._parts[name].shape), []
        for move in moves:
            assert isinstance(move, Move)
            found.append(move.transfer(shape, self.place))
            shape = found[-1].shapes[0]
        return tuple(found)


@dataclass(frozen=True)
class Original:
    """A tensor of the original model: its whole shape, and all of its names."""

    shape: tuple[int, ...]
    names: tuple[str, ...]


def shapes_of(module: ParallelModule) -> dict[str, Original]:
    """The parameters and buffers of the original model, by each of their names."""
    found: dict[str, Original] = {}
    for name, part in (*module._stored.items(), *module._buffered.items()):
        names = (name, *part.tied)
        found.update(dict.fromkeys(names, Original(part.shape, names)))
    return found


@dataclass
class _Backward:
    """A backward that is going on: the gradients from before it, and the tapes of the forwards it goes through."""

    before: dict[str, Tensor]
    tapes: list[Tape]


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, module: ParallelModule, tape: Tape, num_roots: int, anchor: Tensor, value: Tensor, *inputs: Tensor
    ) -> Tensor:
        ctx.module, ctx.tape, ctx.num_roots = module, tape, num_roots
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.module.begin_backward(ctx.tape)
        zero = torch.zeros((), device=gradient.device)
        num_tokens = len(ctx.tape.tokens)
        return (None, None, None, None, None, *(gradient,) * ctx.num_roots, *(zero,) * num_tokens)


class EndSync:
    """Makes gradients complete after backward, one parameter after the other."""

    def begin(self, module: ParallelModule) -> None:
        return None

    def arrived(self, module: ParallelModule, name: str) -> None:
        return None

    def end(self, module: ParallelModule, tapes: Sequence[Tape]) -> Mapping[str, Tensor]:
        used: dict[str, list[Used]] = {}
        for tape in tapes:
            for use in tape.used:
                used.setdefault(use.parameter, []).append(use)
        found: dict[str, Tensor] = {}
        for name, _ in module.sync_order():
            module.transport.doing = Doing(f"gradient sync of {name}")
            gradient = self._complete(module, name, used.get(name, ()))
            if gradient is not None:
                found[name] = gradient
        module.transport.doing = Doing()
        return separate(found)

    def _complete(self, module: ParallelModule, name: str, used: Sequence[Used]) -> Tensor | None:
        total = Gradient()
        transfers = module.sync_transfers(name)
        sources = []
        if transfers is not None:
            held = module.part(name)
            sources.append(([(held.shape, module.sinks.get(name, Gradient()))], transfers, held.dtype))
        sources += [(list(use.leaves), use.transfers, use.dtype) for use in used]
        for leaves, path, dtype in sources:
            parts = [_gradient(shape, sink, dtype, module.device) for shape, sink in leaves]
            for result in execute_all(path, parts, module.transport, dtype=dtype):
                total.add(result)
        return total.total


def _gradient(shape: torch.Size, sink: Gradient, dtype: torch.dtype, device: torch.device) -> Tensor:
    if sink.total is None:
        return torch.zeros(shape, dtype=real_dtype(dtype), device=device)
    assert sink.total.shape == shape, f"a gradient has shape {tuple(sink.total.shape)}, planned {tuple(shape)}"
    return sink.total


def separate(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """No two gradients on one memory (autograd may make them so): whoever scales one in place must not scale both."""
    seen: set[int] = set()
    for name, gradient in gradients.items():
        address = gradient.untyped_storage().data_ptr()
        gradients[name] = gradient.clone() if address in seen else gradient
        seen.add(address)
    return gradients

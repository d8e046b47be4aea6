"""Graph: the captured single-device forward program.

    Graph  := inputs, parameters, buffers, constants, Op ..., outputs, loss
    Op     := name, target, args, kwargs -> output tensors; path@call, source line, context
    Arg    := Ref | int | float | bool | None | str | dtype | device | Size | (Arg, ...)

Functional: every tensor is written once, by an op or as an input; in-place operators have become their
functional twins, and buffer updates are tensors named by `Buffer.update`. Ops stand in execution order, no op is
dead. A multi-output operator (split, unbind, max.dim) lists all of its outputs; there is no getitem.
`needs_grad` of a tensor is static: some trainable parameter reaches it through ops that run in grad mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from weft.runtime.program.asks import Ask
from weft.runtime.program.reads import Reads


@dataclass(frozen=True)
class Ref:
    """A tensor standing in an op's arguments."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Size:
    """A symbolic size: an expression over the symbols of dynamic dims, and its value for the example."""

    expr: str
    hint: int

    def __str__(self) -> str:
        return self.expr

    def __index__(self) -> int:
        return self.hint


Arg = Any
Dim = int | Size


@dataclass(frozen=True)
class Tensor:
    """A logical tensor: its whole shape, dtype, and whether a gradient flows into it."""

    name: str
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    needs_grad: bool = False

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The shape with symbolic sizes at their example's value."""
        return tuple(int(dim.hint) if isinstance(dim, Size) else dim for dim in self.shape)

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor, at the example's sizes."""
        return math.prod(self.sizes) * self.dtype.itemsize

    def __str__(self) -> str:
        dims = " ".join(map(str, self.shape))
        return f"%{self.name}: {str(self.dtype).removeprefix('torch.')}[{dims}]{' grad' if self.needs_grad else ''}"


@dataclass(frozen=True)
class Source:
    """The user's own line that made an op."""

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f"  {self.text}" if self.text else "")

    @property
    def place(self) -> str:
        """`model.py:12`, as programs and messages name it; "" if it is not known."""
        return f"{Path(self.file).name}:{self.line}" if self.line else ""


NOWHERE = Source("", 0)


@dataclass(frozen=True)
class Autocast:
    """An autocast region: device type, dtype, on or off."""

    device: str
    dtype: torch.dtype
    enabled: bool

    def around(self) -> torch.autocast:
        """The context manager; casts are made anew each time, as those of a graph are."""
        return torch.autocast(self.device, self.dtype, self.enabled, cache_enabled=False)


@dataclass(frozen=True)
class Op:
    """One call of an operator.

    Args:
        name: unique in the Graph and stable: module path, call and operator (`h.0.attn.c_attn/linear`,
            `h.0.mlp@1/gelu`, `h.0.attn/view_2`).
        target: `aten.linear.default`; `weft.NAME` for a function of the runtime that stands in for an operator;
            `function:NAME` for an opaque `autograd.Function`.
        outputs: names of the tensors made, one per output.
        path: of the innermost module that ran it; "" for the root. `call` counts that module's calls from 0.
        grad: grad mode was on.
        recompute: number of the checkpoint region it lies in, if any.
        constant: depends on no input, parameter or buffer: the same in every step.
        draw: for a random operator, how many random draws came before it in the forward.
        function: the callable behind an opaque op.
    """

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[str, ...]
    path: str = ""
    call: int = 0
    source: Source = NOWHERE
    grad: bool = True
    autocast: Autocast | None = None
    recompute: int | None = None
    constant: bool = False
    draw: int | None = None
    function: Callable[..., Any] | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        """The operator's short name: `linear` of `aten.linear.default`, `mine` of `library.mine.default`."""
        if self.target.startswith("function:"):
            return self.target.removeprefix("function:").split(".")[-1]
        words = self.target.split(".")
        return words[1] if len(words) > 1 else words[0]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Tensor operands in the order they stand in args, then kwargs; a tensor may occur twice."""
        return tuple(ref.name for ref in refs((self.args, tuple(value for _, value in self.kwargs))))

    @property
    def address(self) -> str:
        """`path@call`, the call left out if it is the first."""
        return self.path if self.call == 0 else f"{self.path}@{self.call}"

    @property
    def line(self) -> str:
        """The user's line, its file without folders: `model.py:12`; "" where there is none."""
        return f"{Path(self.source.file).name}:{self.source.line}" if self.source.line else ""

    @property
    def place(self) -> str:
        """For errors: the user's line, or the op's name where there is none."""
        return f"{self.source}  ({self.name})" if self.source.line else self.name


def refs(arg: Arg) -> Iterator[Ref]:
    """The tensor references in an argument tree, in order."""
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple | list):
        for item in arg:
            yield from refs(item)


def map_refs(arg: Arg, change: Callable[[Ref], Arg]) -> Arg:
    """The same argument tree with every reference replaced."""
    if isinstance(arg, Ref):
        return change(arg)
    if isinstance(arg, tuple | list):
        return tuple(map_refs(item, change) for item in arg)
    return arg


def with_refs(op: Op, change: Callable[[Ref], Ref]) -> Op:
    """The op with every reference to a tensor replaced."""
    args = map_refs(op.args, change)
    return replace(op, args=args, kwargs=tuple((key, map_refs(value, change)) for key, value in op.kwargs))


@dataclass(frozen=True)
class Input:
    """A tensor leaf of the example: its tensor and its place there (`batch['x']`, `0`)."""

    tensor: str
    where: str
    index: int
    """Position among all flattened leaves of (args, kwargs); non-tensor leaves count too."""


@dataclass(frozen=True)
class Parameter:
    """A parameter: its tensor, all dotted names of it (more than one if tied), whether it is trained."""

    tensor: str
    names: tuple[str, ...]
    trainable: bool = True
    used: bool = True


@dataclass(frozen=True)
class Buffer:
    """A buffer: its tensor, all dotted names of it, and the tensor holding its value after the step, if updated."""

    tensor: str
    names: tuple[str, ...]
    persistent: bool = True
    update: str | None = None


@dataclass(frozen=True)
class Graph:
    """The captured program.

    Args:
        tensors: every tensor by name.
        constants: values of tensors baked into the program (`torch.tensor(...)` in forward, module attributes).
        outputs: the tensor leaves of the model's output, in order; None where a leaf is not a tensor.
        loss: the scalar loss among the outputs, or None (a sub-module).
        in_spec, out_spec: pytree specs of (args, kwargs) and of the output.
        leaves: all flattened leaves of the example; None where a tensor stands.
        out_leaves: the same of the output.
        symbols: the dynamic dims: symbol -> (input tensor, dim).
        guards: what the symbols must fulfil for this to be the program: a condition, and the user's line behind it.
        asks: what forward asks about a call besides values, with the example's answers.
        reads: what forward reads besides its inputs, parameters and buffers.
    """

    name: str
    tensors: Mapping[str, Tensor]
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    constants: Mapping[str, torch.Tensor]
    ops: tuple[Op, ...]
    outputs: tuple[str | None, ...]
    loss: str | None
    in_spec: Any = None
    out_spec: Any = None
    leaves: tuple[Any, ...] = ()
    out_leaves: tuple[Any, ...] = ()
    symbols: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    guards: tuple[tuple[str, str], ...] = ()
    asks: tuple[Ask, ...] = ()
    reads: Reads = field(default_factory=Reads)

    @cached_property
    def producers(self) -> Mapping[str, Op]:
        """The op that makes each tensor; inputs, parameters, buffers and constants have none."""
        return {name: op for op in self.ops for name in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Op, ...]]:
        """The ops that read each tensor, in order, each op once."""
        found: dict[str, list[Op]] = {name: [] for name in self.tensors}
        for op in self.ops:
            for name in dict.fromkeys(op.inputs):
                found[name].append(op)
        return {name: tuple(ops) for name, ops in found.items()}

    @cached_property
    def by_name(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def parameter_tensors(self) -> Mapping[str, Parameter]:
        """Parameters by the name of their tensor."""
        return {parameter.tensor: parameter for parameter in self.parameters}

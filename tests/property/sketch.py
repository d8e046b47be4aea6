"""Sketch: writes a Graph op by op, running every op on small real tensors to learn what it makes.

No capture: a graph costs a millisecond. Gradients are static as in a captured graph: an output needs one if autograd
says so for operands that do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.property.harness import STREAM, call
from weft.ir.graph import Buffer, Graph, Input, Op, Parameter, Ref, Source, Tensor
from weft.verify.draw_mode import DrawMode

MOST_ELEMENTS = 600


@dataclass(frozen=True)
class Case:
    """A graph and whole tensors to run it on."""

    graph: Graph
    state: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]

    def __str__(self) -> str:
        lines = [f"{name} = {op_text(op)}" for op in self.graph.ops for name in [", ".join(op.outputs)]]
        shapes = {name: list(tensor.sizes) for name, tensor in self.graph.tensors.items()}
        kept = [f"parameter {p.tensor}{'' if p.trainable else ' (frozen)'}" for p in self.graph.parameters]
        return "\n".join([str(shapes), *kept, *lines, f"outputs {self.graph.outputs}, loss {self.graph.loss}"])


def op_text(op: Op) -> str:
    """An op on one line."""
    told = "" if op.grad else " no_grad"
    return f"{op.name}: {op.target}({', '.join(map(str, op.args))}, {dict(op.kwargs)}){told}"


@dataclass
class Sketch:
    """A graph being written."""

    rng: random.Random
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    parameters: dict[str, bool] = field(default_factory=dict)
    buffers: dict[str, str | None] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    draws: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        self.mode = DrawMode(STREAM)

    def noise(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def input(self, shape: tuple[int, ...]) -> str:
        name = self._hold("x", self.noise(shape))
        self.inputs.append(name)
        return name

    def integers(self, shape: tuple[int, ...], high: int) -> str:
        name = self._hold("i", torch.randint(0, high, shape, generator=self.generator))
        self.inputs.append(name)
        return name

    def constant(self, value: torch.Tensor) -> str:
        name = self._hold("c", value)
        self.constants[name] = value
        return name

    def parameter(self, shape: tuple[int, ...], *, trainable: bool = True) -> str:
        name = self._hold("w", self.noise(shape) * 0.7, needs_grad=trainable)
        self.parameters[name] = trainable
        return name

    def buffer(self, shape: tuple[int, ...]) -> str:
        name = self._hold("s", self.noise(shape))
        self.buffers[name] = None
        return name

    def weight(self, shape: tuple[int, ...]) -> str:
        """A parameter: sometimes one that is in use already, sometimes a frozen one."""
        same = [name for name in self.parameters if tuple(self.values[name].shape) == shape]
        if same and self.rng.random() < 0.6:
            return self.rng.choice(same)
        return self.parameter(shape, trainable=self.rng.random() > 0.1)

    def run(
        self,
        target: str,
        *args: Any,
        grad: bool = True,
        random_op: bool = False,
        function: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add an op; the names of what it makes."""
        number = len(self.ops)
        op = Op(
            name=f"m/{target.removeprefix('function:').removeprefix('aten.').split('.')[0]}_{number}",
            target=target,
            args=args,
            kwargs=tuple(kwargs.items()),
            outputs=(),
            path="m",
            source=Source("sketch.py", number + 1),
            grad=grad,
            draw=self.draws if random_op else None,
            function=function,
        )
        values = {name: self.values[name].detach().requires_grad_(self.tensors[name].needs_grad) for name in op.inputs}
        results = call(op, values, self.mode)
        self.draws += random_op
        names = [self._hold("t", result.detach(), needs_grad=result.requires_grad) for result in results]
        self.ops.append(Op(**{**vars_of(op), "outputs": tuple(names)}))
        self.read.update(op.inputs)
        return names

    def _hold(self, prefix: str, value: torch.Tensor, *, needs_grad: bool = False) -> str:
        name = f"{prefix}{len(self.values)}"
        self.values[name] = value
        self.tensors[name] = Tensor(name, tuple(value.shape), value.dtype, needs_grad)
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def floats(self, fits: Callable[[tuple[int, ...]], bool] = lambda shape: True) -> list[str]:
        """Float tensors that ops made, or inputs, of a fitting shape; unread and late ones more often."""
        found = []
        made = [name for op in self.ops for name in op.outputs]
        for at, name in enumerate([*self.inputs, *made]):
            if self.values[name].is_floating_point() and fits(self.shape(name)):
                found += [name] * (1 + (name not in self.read) * 3 + (at > len(made) // 2))
        return found

    def pick(self, fits: Callable[[tuple[int, ...]], bool] = lambda shape: True) -> str | None:
        found = self.floats(fits)
        return self.rng.choice(found) if found else None

    def finish(self, loss: str, extra: list[str]) -> Case:
        """The graph with everything that nothing depends on left out."""
        updates = [update for update in self.buffers.values() if update is not None]
        alive = {loss, *extra, *updates}
        kept: list[Op] = []
        for op in reversed(self.ops):
            if alive & set(op.outputs):
                kept.append(op)
                alive |= set(op.inputs)
        kept.reverse()
        made = {name for op in kept for name in op.outputs}
        inputs = [name for name in self.inputs if name in alive]
        buffers = {name: update for name, update in self.buffers.items() if name in alive or update is not None}
        constants = {name: value for name, value in self.constants.items() if name in alive}
        held = {*made, *inputs, *self.parameters, *buffers, *constants}
        graph = Graph(
            name="random",
            tensors={name: tensor for name, tensor in self.tensors.items() if name in held},
            inputs=tuple(Input(name, str(i), i) for i, name in enumerate(inputs)),
            parameters=tuple(Parameter(n, (n,), t, used=n in alive) for n, t in self.parameters.items()),
            buffers=tuple(Buffer(n, (n,), update=update) for n, update in buffers.items()),
            constants=constants,
            ops=tuple(kept),
            outputs=(loss, *extra),
            loss=loss,
        )
        state = {name: self.values[name] for name in (*self.parameters, *buffers, *constants)}
        return Case(graph, state, {name: self.values[name] for name in inputs})


def vars_of(op: Op) -> dict[str, Any]:
    """The fields of an op."""
    return {name: getattr(op, name) for name in Op.__dataclass_fields__}


def ref(name: str) -> Ref:
    return Ref(name)


def small(shape: tuple[int, ...]) -> bool:
    """True if a tensor of that shape is quick to work on."""
    return 0 < math.prod(shape) <= MOST_ELEMENTS

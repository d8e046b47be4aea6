"""Program: what the devices run, in order.

    Program := Graph, devices, Value ..., Step ..., where parameters are stored
    Value   := a tensor of the Graph in one Layout, and the Layout of its gradient (None: no gradient flows)
    Step    := Use | Compute | Take | Give | Reshard | Chunks | Recompute | Sync
    Move    := kind, Layout -> Layout

One list of steps serves all devices: a device runs the steps whose layouts name it, in list order. Backward is the
reverse: each Compute's by autograd, each Reshard's by its own backward moves, Syncs last, in list order. A Value
outside a `Chunks` holds one tensor per slot of a device (one, unless a device stands in several cells); inside, a
step works on the slot of the current chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from weft.ir.graph import Graph
from weft.ir.layout import Layout
from weft.ir.oplayout import OpLayout


@dataclass(frozen=True)
class Value:
    """A tensor of the Graph as it lies on the devices at one point of the Program."""

    name: str
    tensor: str
    layout: Layout
    grad: Layout | None = None


@dataclass(frozen=True)
class Move:
    """One change of layout. `kind` names the collective that carries it:

    local (nothing leaves a device), all_reduce, all_gather, reduce_scatter, all_to_all, exchange (point to point).
    What goes where follows from the two layouts alone (`ir/routes.py`).
    """

    kind: str
    source: Layout
    target: Layout


@dataclass(frozen=True)
class Use:
    """Bring a parameter, buffer, input or constant from where it is stored to where it is used.

    For a trained parameter the result is a fresh leaf: its gradient is collected by a Sync.
    """

    value: str
    moves: tuple[Move, ...]
    """From the stored layout of the tensor to the layout of the value."""


@dataclass(frozen=True)
class Compute:
    """Run an op on every cell (inside Chunks: on the current one)."""

    op: str
    layout: OpLayout
    inputs: tuple[str, ...]
    """A value per tensor operand, in the order of `op.inputs`."""
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Take:
    """Inside Chunks: cut the current chunk's part out of a value that a device holds whole. Local, by autograd."""

    source: str
    target: str


@dataclass(frozen=True)
class Give:
    """Inside Chunks: add or place the current chunk's part into a value that a device holds whole. Local."""

    source: str
    target: str


@dataclass(frozen=True)
class Reshard:
    """Bring a value into another layout; in backward bring the gradient back. `backward` is None on edges
    without gradient."""

    source: str
    target: str
    forward: tuple[Move, ...]
    backward: tuple[Move, ...] | None


@dataclass(frozen=True)
class Chunks:
    """Run the body once per cell of each device, chunk by chunk through the whole chain."""

    axis: str
    body: tuple[Step, ...]
    recompute: bool = False
    ends: bool = False
    """It gives one value, which is all that the Recompute around it leaves: that one's second run need not make it."""


@dataclass(frozen=True)
class Recompute:
    """Run the body without keeping what is inside it; run it again in backward."""

    body: tuple[Step, ...]


@dataclass(frozen=True)
class Sync:
    """After backward: bring the gradients of all uses of a parameter to its stored layout, and add them."""

    parameter: str
    sources: tuple[str, ...]
    """Values made by Use, one per distinct use layout."""
    moves: tuple[tuple[Move, ...], ...]
    """For each source, from its gradient layout to the parameter's stored one."""


Step = Use | Compute | Take | Give | Reshard | Chunks | Recompute | Sync


def walk(steps: Iterable[Step]) -> Iterator[Step]:
    """Every step, each before those of its body."""
    for step in steps:
        yield step
        if isinstance(step, Chunks | Recompute):
            yield from walk(step.body)


def values_read(step: Step) -> list[str]:
    """Values that a step reads, those of its body included."""
    match step:
        case Compute():
            return list(step.inputs)
        case Take() | Give() | Reshard():
            return [step.source]
        case Chunks() | Recompute():
            return [name for inner in step.body for name in values_read(inner)]
        case Use() | Sync():
            return []


def outputs_of(step: Step) -> tuple[str, ...]:
    """Values that a step makes and leaves behind."""
    match step:
        case Use():
            return (step.value,)
        case Compute():
            return step.outputs
        case Take() | Reshard() | Give():
            return (step.target,)
        case Chunks():
            return tuple(inner.target for inner in step.body if isinstance(inner, Give))
        case Recompute():
            return tuple(name for inner in step.body for name in outputs_of(inner))
        case Sync():
            return ()


@dataclass(frozen=True)
class Program:
    """What the devices run.

    Args:
        devices: how many there are; ids are 0 .. devices - 1.
        stored: where each parameter, buffer, input and constant lies before the step. Parameters' gradients end
            in the same layout.
        outputs: for each graph output that was asked for, the value that holds it (copied on every device).
        loss: the value that backward starts from; its gradient is 1 in every cell.
        roots: in place of a loss, the values of outputs that backward starts from. The caller gives their gradients,
            the same on every device.
        entries: for each input that needs a gradient, the value whose gradient the caller gets, on every device.
        updates: buffer tensor -> value holding its new content, in its stored layout.
        kept: parameters that stay as they are used while the optimizer updates what is stored of them; True if their
            gradients too are added up as used, over micro-batches.
        given: outputs that are not whole everywhere: they are given on in a layout, and their gradients come in it.
    """

    graph: Graph
    devices: int
    values: Mapping[str, Value]
    steps: tuple[Step, ...]
    stored: Mapping[str, Layout]
    outputs: Mapping[str, str] = field(default_factory=dict)
    loss: str | None = None
    roots: tuple[str, ...] = ()
    entries: Mapping[str, str] = field(default_factory=dict)
    updates: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, bool] = field(default_factory=dict)
    given: Mapping[str, Layout] = field(default_factory=dict)

    @cached_property
    def ends(self) -> frozenset[str]:
        """The values that are read after the last step: outputs, updates, and what backward starts from."""
        return frozenset(filter(None, (*self.outputs.values(), *self.updates.values(), *self.roots, self.loss)))

    @cached_property
    def reads(self) -> Counter[str]:
        """How often each value is read, by steps and after the last of them."""
        return Counter([*(name for step in self.steps for name in values_read(step)), *self.ends])

    @cached_property
    def syncs(self) -> tuple[Sync, ...]:
        return tuple(step for step in self.steps if isinstance(step, Sync))

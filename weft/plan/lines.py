"""Lines of a plan, and what they add up to, as data.

    Line     := TransLine | AssignLine | StoreLine | OrderLine | BlockLine | StageLine | BatchLine | ScheduleLine
    Decision := what one op was told: axes and their uses, devices, recomputation
    State    := a Decision per op that was told something, axes, stores, blocks, relations, stages, schedule

Lines are written by primitives, recipes and plan files; what each means and what it must fit is `apply.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.ir.graph import Graph
from weft.ir.schedule import Relation, ScheduleLike
from weft.plan.primitives import AxisUse, Transform
from weft.plan.select import ParameterSelection, Selection, fold


@dataclass(frozen=True)
class TransLine:
    """Transform ops."""

    ops: Selection
    transforms: tuple[Transform, ...]

    def __str__(self) -> str:
        return f"trans {self.ops}: {', '.join(map(str, self.transforms))}"


@dataclass(frozen=True)
class AssignLine:
    """Place ops: a device per cell of their grids, row-major."""

    ops: Selection
    devices: tuple[int, ...]
    shape: tuple[int, ...] | None = field(default=None, compare=False)
    """Of the nested array the devices were given as; None if they were a flat list."""

    def __str__(self) -> str:
        return f"assign {self.ops}: devices {' '.join(map(str, self.devices))}"


@dataclass(frozen=True)
class StoreLine:
    """Where parameters, and optimizer state if told, live."""

    parameters: ParameterSelection
    transforms: tuple[Transform, ...]
    state: tuple[Transform, ...] | None = None
    devices: tuple[int, ...] | None = None
    """If told: the parameters lie whole on each of these, and nowhere else."""
    reduced: bool = False
    """Gradients are added up where the state lies."""

    def __str__(self) -> str:
        where = _where(self.transforms, self.state, self.devices, "; gradients and" if self.reduced else ";")
        return f"store {self.parameters.text}: {where}"


@dataclass(frozen=True)
class OrderLine:
    """Relations between events."""

    relations: tuple[Relation, ...]

    def __str__(self) -> str:
        return f"order {', '.join(map(str, self.relations))}"


@dataclass(frozen=True)
class BlockLine:
    """A named set of ops."""

    name: str
    ops: Selection

    def __str__(self) -> str:
        return f"block {self.name}: {self.ops}"


@dataclass(frozen=True)
class StageLine:
    """Ops that live together on some of the devices."""

    name: str
    ops: Selection
    devices: tuple[int, ...]

    def __str__(self) -> str:
        return f"stage {self.name}: {self.ops} on devices {' '.join(map(str, self.devices))}"


@dataclass(frozen=True)
class BatchLine:
    """Cut the batch of a step into micro-batches."""

    count: int

    def __str__(self) -> str:
        return f"{self.count} micro-batches"


@dataclass(frozen=True)
class ScheduleLine:
    """The order of a step's events."""

    schedule: ScheduleLike = field(compare=False)
    text: str

    def __str__(self) -> str:
        return f"order {self.text}"


Line = TransLine | AssignLine | StoreLine | OrderLine | BlockLine | StageLine | BatchLine | ScheduleLine


@dataclass(frozen=True)
class Decision:
    """What an op was told.

    Args:
        uses: the axes of its grid, in the order in which they were added.
        devices: one per cell, row-major; None if nobody said.
        recompute: number of the trans line that marked it; ops of one line are recomputed together.
        algorithm: "" for the rule's own.
    """

    uses: tuple[AxisUse, ...] = ()
    devices: tuple[int, ...] | None = None
    recompute: int | None = None
    algorithm: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the grid's axes."""
        return tuple(one.size for one in self.uses)

    @property
    def num_cells(self) -> int:
        return math.prod(self.sizes)

    def axis(self, name: str) -> AxisUse | None:
        """What the axis of that name does, if the op has it."""
        return next((one for one in self.uses if one.axis == name), None)

    def __str__(self) -> str:
        words = [", ".join(map(str, self.uses))] if self.uses else []
        if self.devices is not None:
            words.append(f"devices {' '.join(map(str, self.devices))}")
        if self.recompute is not None:
            words.append("recompute")
        return "   ".join(words)


@dataclass(frozen=True)
class Store:
    """Where a parameter lives: for each axis how it cuts a dim (the Cut's name is the dim's number) or copies.

    `state` says the same of its optimizer state; None: like the parameter. `devices`: it lies whole on each of these.
    """

    uses: tuple[AxisUse, ...]
    state: tuple[AxisUse, ...] | None
    place: str
    devices: tuple[int, ...] | None = None
    reduced: bool = False
    """Gradients are added up where the state lies."""

    @property
    def kept(self) -> bool:
        """True if the parameter stays as it is used while the optimizer works on its parts."""
        return self.state is not None and not self.uses

    @property
    def updated(self) -> tuple[AxisUse, ...]:
        """How what the optimizer updates lies."""
        return self.uses if self.state is None else self.state

    def __str__(self) -> str:
        return _where(self.uses, self.state, self.devices, "   gradients and" if self.reduced else "  ")


def _where(uses: Sequence[object], state: Sequence[object] | None, devices: Sequence[int] | None, between: str) -> str:
    """Where a parameter lives, and its optimizer state if told."""
    if devices is not None:
        return f"whole on {' '.join(map(str, devices))}"
    held, kept = (", ".join(map(str, some or ())) or "as used" for some in (uses, state))
    return held if state is None else f"{held}{between} state {kept}"


@dataclass(frozen=True)
class Stage:
    """Where an op's stage lives: device i of what it would run on is devices[i]."""

    name: str
    devices: tuple[int, ...]


@dataclass(frozen=True)
class State:
    """What the lines so far add up to."""

    decisions: Mapping[str, Decision] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)
    stores: Mapping[str, Store] = field(default_factory=dict)
    blocks: Mapping[str, Selection] = field(default_factory=dict)
    orders: tuple[Relation, ...] = ()
    stages: Mapping[str, Stage] = field(default_factory=dict)
    """By op."""
    microbatches: int = 1
    schedule: ScheduleLike = ""
    num_recomputes: int = 0
    num_lines: int = 0


def plan_table(graph: Graph, devices: int, state: State) -> str:
    """A plan as text, the same for equal plans: one row per op that was told something, repeated layers folded.

    `layers.*.attn.q_proj/linear   cut n 2 (tp)   devices 0 1`
    """
    axes = " ".join(f"{name}={size}" for name, size in state.axes.items())
    lines = [f"plan of {graph.name} for {devices} device{'s' if devices > 1 else ''}{': ' if axes else ''}{axes}"]
    lines += _aligned(_rows(graph, state))
    for tensor, store in state.stores.items():
        lines.append(f"  store {graph.parameter_tensors[tensor].names[0]}   {store}")
    lines += [f"  block {name}   {ops}" for name, ops in state.blocks.items()]
    lines += [f"  order {relation}" for relation in state.orders]
    told = sum(op.name in state.decisions for op in graph.ops)
    if told < len(graph.ops):
        lines.append(f"  {len(graph.ops) - told} of {len(graph.ops)} ops follow their neighbours")
    return "\n".join(lines)


def _rows(graph: Graph, state: State) -> list[tuple[str, str]]:
    """Address and decision; layers share a row if all of them were told the same."""
    groups: dict[str, dict[str, Decision]] = {}
    for op in graph.ops:
        groups.setdefault(fold(op.name), {})[op.name] = state.decisions.get(op.name, Decision())
    rows = []
    for folded, members in groups.items():
        texts = {name: str(decision) for name, decision in members.items()}
        if len(set(texts.values())) == 1:
            rows.append((folded, next(iter(texts.values()))))
        else:
            rows.extend(texts.items())
    return [(name, text) for name, text in rows if text]


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}   {text}" for name, text in rows]

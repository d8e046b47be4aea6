"""Plan: all decisions about a Graph, as data.

In: a Graph, a number of devices, lines written by primitives. Out: a Decision for each op that was told something.
A Plan never changes: every primitive returns a new one with one more line, or raises a PlanError and leaves the old
one as it was; its `can_*` twin answers with the reason instead. Plans with equal lines are equal.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Concatenate, ParamSpec

from weft.errors import PlanError, RuleError
from weft.ir.graph import Graph, Op
from weft.ir.schedule import Relation, Schedule, ScheduleLike
from weft.ops.book import RuleBook
from weft.ops.rule import Rule
from weft.plan.apply import Context, apply
from weft.plan.lines import (
    AssignLine,
    BatchLine,
    BlockLine,
    Decision,
    Line,
    OrderLine,
    ScheduleLine,
    Stage,
    StageLine,
    State,
    Store,
    StoreLine,
    TransLine,
    plan_table,
)
from weft.plan.primitives import AxisUse, RecomputeMark, Transform, is_count, with_axis
from weft.plan.select import ParametersLike, Selection, match, match_parameters, parse, refuse_empty, select

__all__ = ["AxisUse", "Decision", "Plan", "Store", "Verdict"]

OpsLike = Selection | Op | str | Iterable[Selection | Op | str]
Devices = int | Sequence["Devices"]
"""Device numbers, nested like the grid's axes, or flat."""


@dataclass(frozen=True)
class Verdict:
    """The answer of a `can_*` question: true or false, and why."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


Given = ParamSpec("Given")


def _asking(primitive: Callable[Concatenate[Plan, Given], Plan]) -> Callable[Concatenate[Plan, Given], Verdict]:
    """Whether a primitive would be accepted, and why not."""

    def can(plan: Plan, /, *args: Given.args, **kwargs: Given.kwargs) -> Verdict:
        try:
            primitive(plan, *args, **kwargs)
        except (PlanError, RuleError) as error:
            return Verdict(False, str(error))
        return Verdict(True)

    return can


@dataclass(frozen=True)
class Plan:
    """Decisions about how a graph runs on `devices` devices.

    Args:
        graph: the captured program.
        devices: how many there are; ids are 0 .. devices - 1.
        lines: what the primitives wrote, in order.
    """

    graph: Graph = field(compare=False, repr=False)
    devices: int
    lines: tuple[Line, ...] = ()
    book: RuleBook | None = field(default=None, compare=False, repr=False)
    """The rules of the graph's ops, if somebody has them already."""

    def __post_init__(self) -> None:
        if not is_count(self.devices):
            raise PlanError(f"cannot plan for {self.devices!r} devices", remedy="give a whole number of at least 1")

    @cached_property
    def rules(self) -> RuleBook:
        """The rules of the graph's ops."""
        return RuleBook(self.graph) if self.book is None else self.book

    @cached_property
    def _state(self) -> State:
        state = State()
        for line in self.lines:
            state = apply(state, line, Context(self.graph, self.devices, self.rules))
        return state

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """What each op was told, by op name; ops that were told nothing are absent."""
        return self._state.decisions

    @property
    def axes(self) -> Mapping[str, int]:
        """All axes and their sizes, in the order in which they first appear."""
        return self._state.axes

    @property
    def stores(self) -> Mapping[str, Store]:
        """Where parameters live, by tensor name."""
        return self._state.stores

    @property
    def blocks(self) -> Mapping[str, Selection]:
        return self._state.blocks

    @property
    def orders(self) -> tuple[Relation, ...]:
        return self._state.orders

    @property
    def stages(self) -> Mapping[str, Stage]:
        """The stage of each op that is in one, by op name."""
        return self._state.stages

    @property
    def microbatches(self) -> int:
        """Into how many micro-batches a step's batch is cut."""
        return self._state.microbatches

    @property
    def schedule(self) -> ScheduleLike:
        """The order of a step's events; "" if nobody said."""
        return self._state.schedule

    def rule(self, op: Op | str) -> Rule:
        """The rule of an op."""
        return self.rules.rule(self.graph.by_name[op] if isinstance(op, str) else op)

    def decision(self, op: Op | str) -> Decision:
        """What the op was told, an empty Decision if nothing."""
        return self.decisions.get(op if isinstance(op, str) else op.name, Decision())

    def match(
        self,
        pattern: str = "**",
        *,
        op: str | Sequence[str] | None = None,
        where: Callable[[Op], bool] | None = None,
    ) -> Selection:
        """Ops by module path, operator and condition; see `weft.plan.select`."""
        return match(self.graph, pattern, op=op, where=where)

    def select(self, ops: OpsLike) -> Selection:
        """The ops meant by a Selection, an Op, its name, a pattern, or several of these."""
        return refuse_empty(self._select(ops))

    def _select(self, ops: OpsLike) -> Selection:
        if isinstance(ops, Selection):
            missing = [name for name in ops.names if name not in self.graph.by_name]
            if missing:
                raise PlanError(
                    f"{missing[0]} was selected in another graph ({ops.graph.name})",
                    remedy=f"select ops of {self.graph.name}: plan.match(...)",
                )
            return ops if ops.graph is self.graph else select(self.graph, ops.names)
        if isinstance(ops, Op):
            return self._select(ops.name)
        if isinstance(ops, str):
            known = ops in self.graph.by_name
            return select(self.graph, (ops,)) if known else parse(self.graph, ops)
        names: set[str] = set()
        for item in ops:
            known = isinstance(item, str) and item in self.graph.by_name
            names.update((item,) if known else self.select(item).names)  # type: ignore[arg-type]
        return select(self.graph, names)

    def _with(self, line: Line) -> Plan:
        state = apply(self._state, line, Context(self.graph, self.devices, self.rules))
        plan = Plan(self.graph, self.devices, (*self.lines, line), self.rules)
        plan.__dict__["_state"] = state
        return plan

    # --- primitives ---------------------------------------------------------------------------------------------

    def trans(self, ops: OpsLike, *transforms: Transform) -> Plan:
        """Transform ops: cut, copy, recompute.

        rewrite: op with axes (a ...)  ->  op with axes (a ..., one per transform, in order)

        Args:
            ops: a Selection, an Op, a name, a pattern, or several.
            transforms: made by `cut`, `copy`, `algorithm`, `recompute`.
        """
        if not transforms:
            raise PlanError("trans was given no transform", remedy="add cut(...), copy(...) or recompute()")
        return self._with(TransLine(self.select(ops), self._named(transforms)))

    def assign(self, ops: OpsLike, devices: Devices) -> Plan:
        """Place ops: a device for each cell of their grids. A device may repeat: its cells run chunk by chunk.

        rewrite: op on cells (i, j, ...)  ->  op's cell (i, j, ...) runs on devices[i][j]...
        """
        flat, shape = _flatten(devices)
        return self._with(AssignLine(self.select(ops), flat, shape if len(shape) > 1 else None))

    def stage(self, name: str, ops: OpsLike, devices: Sequence[int]) -> Plan:
        """Place ops together on some of the devices, however they are cut there.

        rewrite: ops over devices 0 .. k - 1  ->  the same over devices[0] .. devices[k - 1], in micro-batches
        """
        return self._with(StageLine(name, self.select(ops), tuple(devices)))

    def cut_batch(self, microbatches: int) -> Plan:
        """Cut the batch of a step into micro-batches, whose gradients are added up.

        rewrite: one step over the batch  ->  one step over `microbatches` parts of it
        """
        return self._with(BatchLine(microbatches))

    def order(self, *relations: Relation | ScheduleLike) -> Plan:
        """Say what runs before what (see `weft.plan.order`), or the whole order: the name of a schedule, the events of
        every device, or a function that makes them of a Pipeline.

        rewrite: any order that data allows  ->  those in which every relation holds
        """
        if len(relations) == 1 and not isinstance(relations[0], Relation):
            said = relations[0]
            if not isinstance(said, str | Schedule | Mapping) and not callable(said):
                raise PlanError(
                    f"{said!r} is no order of events",
                    remedy="give a name, rows such as {0: 'F0 F1 B0 B1'}, a function of the pipeline, or relations",
                )
            text = said if isinstance(said, str) else getattr(said, "__name__", "as listed")
            return self._with(ScheduleLine(said, text))
        if any(not isinstance(one, Relation) for one in relations):
            raise PlanError("order takes relations, or one schedule", remedy="write order('1f1b')")
        if not relations:
            raise PlanError("order was given no relation", remedy="add before(f(a, m), b(a, m))")
        return self._with(OrderLine(tuple(one for one in relations if isinstance(one, Relation))))

    def store(
        self,
        parameters: ParametersLike,
        *transforms: Transform,
        grad: Transform | Sequence[Transform] | None = None,
        state: Transform | Sequence[Transform] | None = None,
        on: int | Sequence[int] | None = None,
    ) -> Plan:
        """Say where parameters live, by dim number along named axes.

        rewrite: parameter stored as it is used  ->  stored cut (or copied) along the axes, brought to its uses

        Args:
            state: where the optimizer's share lives, if not with the parameter, which then stays as it is used and is
                brought up to date in every step.
            grad: where gradients are added up over micro-batches: with the state if given, else as they arise.
            on: whole on these devices alone (counted from 0 inside the stage, where there are stages).
        """
        states, grads = _several(state), _several(grad)
        found = match_parameters(self.graph, parameters)
        if on is not None:
            return self._with(StoreLine(found, transforms, states, (on,) if isinstance(on, int) else tuple(on)))
        if not transforms and states is None:
            raise PlanError("store was given no transform", remedy="add cut(0, 4, axis='dp'), on= or state=")
        if grads is not None and grads != states:
            raise PlanError(
                "gradients are added up where the optimizer's state lies, or as they arise",
                remedy="give grad= what state= says, or leave it out",
            )
        named = self._named((*transforms, *(states or ())))
        held = None if states is None else named[len(transforms) :]
        return self._with(StoreLine(found, named[: len(transforms)], held, reduced=grads is not None))

    def block(self, name: str, ops: OpsLike) -> Plan:
        """Name a set of ops, so as to order it as one thing.

        rewrite: ops  ->  ops, together called `name`
        """
        return self._with(BlockLine(name, self.select(ops)))

    # --- ask first ----------------------------------------------------------------------------------------------

    can_trans = _asking(trans)
    can_assign = _asking(assign)
    can_order = _asking(order)
    can_store = _asking(store)
    can_block = _asking(block)

    def _named(self, transforms: Sequence[Transform]) -> tuple[Transform, ...]:
        """The transforms with names made up for axes that have none: a0, a1, ..."""
        taken = set(self.axes) | {one.axis for one in transforms if not isinstance(one, RecomputeMark)}
        named: list[Transform] = []
        for transform in transforms:
            if not isinstance(transform, Transform):
                raise PlanError(f"{transform!r} is no transform", remedy="use cut(...), copy(...) or recompute()")
            if not isinstance(transform, RecomputeMark) and not transform.axis:
                number = next(i for i in range(len(taken) + 1) if f"a{i}" not in taken)
                taken.add(f"a{number}")
                named.append(with_axis(transform, f"a{number}"))
            else:
                named.append(transform)
        return tuple(named)

    def __str__(self) -> str:
        return plan_table(self.graph, self.devices, self._state)


def _several(given: Transform | Sequence[Transform] | None) -> tuple[Transform, ...] | None:
    return None if given is None else tuple(given) if isinstance(given, Sequence) else (given,)


def _flatten(devices: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The device numbers row-major, and the shape of the nesting; arrays and scalars of other libraries count too."""
    if hasattr(devices, "__index__") and not isinstance(devices, bool) and not getattr(devices, "shape", ()):
        return (operator.index(devices),), ()
    if isinstance(devices, str | bool) or not isinstance(devices, Iterable):
        raise PlanError(f"{devices!r} is no device", remedy="give device numbers, nested like the grid's axes")
    parts = [_flatten(item) for item in devices]
    shapes = {shape for _, shape in parts}
    if len(shapes) > 1:
        raise PlanError(f"the devices {devices} do not form a grid", remedy="give rows of equal length")
    inner = shapes.pop() if shapes else ()
    return tuple(number for flat, _ in parts for number in flat), (len(parts), *inner)

"""apply(): what a plan's lines add up to.

In: a State and the next Line. Out: the next State, or a PlanError if the line does not fit the op's rule, the devices,
or an earlier line. A line is checked here and nowhere else: primitives, plan files and `can_*` questions all pass
through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.errors import PlanError, RuleError
from weft.ir.graph import Graph, Op
from weft.ir.oplayout import Copied, Cut
from weft.ops.book import RuleBook
from weft.ops.rule import Rule
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
)
from weft.plan.primitives import (
    AxisUse,
    CopyOver,
    CutBy,
    RecomputeMark,
    Transform,
    cut_of_size,
    is_count,
    resolve,
)
from weft.runtime.operators.algorithms import OWN


@dataclass(frozen=True)
class Context:
    """What lines are checked against."""

    graph: Graph
    devices: int
    rules: RuleBook


def apply(state: State, line: Line, context: Context) -> State:
    """The state after one more line."""
    state = replace(state, num_lines=state.num_lines + 1)
    match line:
        case TransLine():
            return _trans(state, line, context)
        case AssignLine():
            return _assign(state, line, context)
        case StoreLine():
            return _store(state, line, context)
        case OrderLine():
            return _order(state, line)
        case BlockLine():
            return _block(state, line)
        case StageLine():
            return _stage(state, line, context)
        case BatchLine():
            return _batch(state, line)
        case ScheduleLine():
            return _schedule(state, line)


def _trans(state: State, line: TransLine, context: Context) -> State:
    axes = _axes(state.axes, line.transforms)
    marks = any(isinstance(one, RecomputeMark) for one in line.transforms)
    decisions = dict(state.decisions)
    for op in line.ops:
        decision = decisions.get(op.name, Decision())
        for transform in line.transforms:
            if isinstance(transform, RecomputeMark):
                decision = _mark(decision, op, state.num_recomputes)
            else:
                decision = _add_axis(decision, transform, op, context)
        decisions[op.name] = decision
    return replace(state, decisions=decisions, axes=axes, num_recomputes=state.num_recomputes + marks)


def _axes(axes: Mapping[str, int], transforms: Iterable[Transform]) -> Mapping[str, int]:
    """All axes with the new ones; the same name must mean the same size everywhere."""
    found = dict(axes)
    for transform in transforms:
        if isinstance(transform, RecomputeMark):
            continue
        known = found.setdefault(transform.axis, transform.size)
        if known != transform.size:
            raise PlanError(
                f"axis {transform.axis!r} has {known} parts elsewhere in the plan, here {transform.size}",
                place=str(transform),
                remedy="use another axis name, or the same number of parts",
            )
    return found


def _mark(decision: Decision, op: Op, number: int) -> Decision:
    if decision.recompute is not None:
        raise PlanError(
            f"{op.name} is recomputed already, together with other ops",
            place=op.place,
            remedy="mark it once: ops of one trans(recompute()) call are recomputed together",
        )
    return replace(decision, recompute=number)


def _add_axis(decision: Decision, transform: CutBy | CopyOver, op: Op, context: Context) -> Decision:
    algorithm = _algorithm(decision, transform, op)
    rule = _ruled(op, algorithm, context)
    use = resolve(transform, op, rule, decision.uses)
    for one in decision.uses:
        if isinstance(one.use, Cut) and one.use.name not in rule.sizes:
            raise PlanError(
                f"{op.name} is cut along {one.use.name!r} already, which {algorithm!r} does not know; its rule: {rule}",
                place=op.place,
                remedy="name the algorithm first, then cut the names of its rule",
            )
    if decision.devices is not None and use.size > 1:
        raise PlanError(
            f"{op.name} was assigned {len(decision.devices)} devices before {transform} made its grid larger",
            place=op.place,
            remedy="transform first, then assign",
        )
    return replace(decision, uses=(*decision.uses, use), algorithm=algorithm)


def _algorithm(decision: Decision, transform: CutBy | CopyOver, op: Op) -> str:
    """The algorithm of an op that has one already, or gets one; an op has one at most."""
    named = transform.algorithm if isinstance(transform, CutBy) else ""
    named = "" if named == OWN else named
    if named and decision.algorithm and named != decision.algorithm:
        raise PlanError(
            f"{op.name} is cut by {decision.algorithm!r} already; {transform} names another algorithm",
            place=op.place,
            remedy="one op is run by one algorithm",
        )
    return named or decision.algorithm


def _ruled(op: Op, algorithm: str, context: Context) -> Rule:
    try:
        return context.rules.rule(op, algorithm)
    except RuleError as error:
        if not algorithm:
            raise
        raise PlanError(error.message, place=error.place, remedy=error.remedy) from None


def _assign(state: State, line: AssignLine, context: Context) -> State:
    for device in line.devices:
        if not 0 <= device < context.devices:
            raise PlanError(
                f"device {device} does not exist: the plan has devices 0 to {context.devices - 1}",
                place=str(line.ops),
                remedy="use existing devices, or make the plan for more",
            )
    decisions = dict(state.decisions)
    for op in line.ops:
        decision = decisions.get(op.name, Decision())
        _check_shape(decision, line, op)
        if decision.devices not in (None, line.devices):
            raise PlanError(
                f"{op.name} was assigned devices {decision.devices} before and {line.devices} now",
                place=op.place,
                remedy="assign an op once",
            )
        decisions[op.name] = replace(decision, devices=line.devices)
    return replace(state, decisions=decisions)


def _check_shape(decision: Decision, line: AssignLine, op: Op) -> None:
    fits = len(line.devices) == decision.num_cells
    if fits and line.shape is not None and line.shape != decision.sizes:
        # axes of one part may be left out of a nested array
        fits = [n for n in line.shape if n > 1] == [n for n in decision.sizes if n > 1]
    if not fits:
        grid = " x ".join(f"{one.axis}={one.size}" for one in decision.uses) or "no axes (one cell)"
        given = "x".join(map(str, line.shape)) if line.shape is not None else str(len(line.devices))
        raise PlanError(
            f"{given} devices do not fit the grid of {op.name}: {grid}",
            place=op.place,
            remedy=f"give {decision.num_cells} devices, one per cell; transform ops before assigning them",
        )


def _store(state: State, line: StoreLine, context: Context) -> State:
    axes = _axes(state.axes, line.transforms)
    axes = _axes(axes, line.state or ())
    stores = dict(state.stores)
    place = f"line {state.num_lines} of the plan, {line}"
    _check_holders(line, context, place)
    for tensor in line.parameters.tensors:
        name = context.graph.parameter_tensors[tensor].names[0]
        if tensor in stores:
            raise PlanError(f"{name} is stored twice", place=place, remedy=f"drop this line or {stores[tensor].place}")
        shape = context.graph.tensors[tensor].sizes
        uses = _stored(line.transforms, name, shape, place)
        held = None if line.state is None else _stored(line.state, name, shape, place)
        if uses and held is not None and uses != held:
            raise PlanError(
                f"{name} is stored in one way and its optimizer's state in another",
                place=place,
                remedy="say where the state lies alone: the parameter stays as it is used, or say both alike",
            )
        stores[tensor] = Store(uses, held, place, line.devices, line.reduced)
    return replace(state, stores=stores, axes=axes)


def _check_holders(line: StoreLine, context: Context, place: str) -> None:
    """The devices that hold parameters whole exist, each once, and nothing else is said of where they lie."""
    if line.devices is None:
        return
    if line.transforms or line.state is not None:
        raise PlanError(
            "what lies whole on some devices is not cut as well", place=place, remedy="leave out on=, or the transforms"
        )
    remedy = "name existing devices, each once; in a stage they are counted from 0 inside it"
    _check_devices("parameters cannot lie", line.devices, context, place, remedy)


def _check_devices(what: str, devices: Sequence[int], context: Context, place: str, remedy: str) -> None:
    """There is at least one device, and each exists and is named once."""
    known = all(is_count(device, 0) and device < context.devices for device in devices)
    if not known or not devices or len(set(devices)) < len(devices):
        raise PlanError(
            f"{what} on devices {list(devices)}: the plan has devices 0 to {context.devices - 1}",
            place=place,
            remedy=remedy,
        )


def _stored(transforms: Iterable[Transform], name: str, shape: tuple[int, ...], place: str) -> tuple[AxisUse, ...]:
    uses: list[AxisUse] = []
    for transform in transforms:
        if isinstance(transform, RecomputeMark):
            raise PlanError("parameters cannot be recomputed", place=place, remedy="use cut() and copy() in store")
        if any(use.axis == transform.axis for use in uses):
            raise PlanError(f"axis {transform.axis!r} stands twice in one store", place=place, remedy="name two axes")
        if isinstance(transform, CopyOver):
            uses.append(AxisUse(transform.axis, transform.size, Copied()))
            continue
        if not isinstance(transform.name, int) or transform.algorithm or transform.groups != 1 or transform.units:
            raise PlanError(
                f"{transform} cannot say how {name} is stored",
                place=place,
                remedy="in store cut a dim by its number, into contiguous parts: cut(0, 4, axis='dp')",
            )
        if not shape:
            raise PlanError(
                f"{name} is a single number: it has no dims to cut",
                place=place,
                remedy="leave it out of the store line: it is stored whole",
            )
        if not -len(shape) <= transform.name < len(shape):
            raise PlanError(
                f"{name} has {len(shape)} dims {list(shape)}, not dim {transform.name}",
                place=place,
                remedy="count dims from 0",
            )
        dim = transform.name % len(shape)
        use = replace(cut_of_size(transform, f"dim {dim} of {name}", shape[dim], place), name=str(dim))
        uses.append(AxisUse(transform.axis, transform.size, use))
    return tuple(uses)


def _order(state: State, line: OrderLine) -> State:
    for relation in line.relations:
        for event in (relation.first, relation.second):
            known = dict.fromkeys((*state.blocks, *(stage.name for stage in state.stages.values())))
            if event.segment not in known:
                raise PlanError(
                    f"no block or stage is called {event.segment!r}",
                    place=str(relation),
                    remedy="define it with plan.block(name, ops) or plan.stage(name, ops, devices); blocks and stages: "
                    + (", ".join(known) or "none yet"),
                )
        if any(
            (old.first, old.second) == (relation.second, relation.first) for old in (*state.orders, *line.relations)
        ):
            raise PlanError(
                f"{relation} contradicts {relation.second} before {relation.first}",
                place=str(line),
                remedy="drop one of the two",
            )
    return replace(state, orders=(*state.orders, *line.relations))


def _block(state: State, line: BlockLine) -> State:
    if line.name in state.blocks:
        raise PlanError(f"block {line.name!r} exists already", place=str(line), remedy="choose another name")
    for name, other in state.blocks.items():
        shared = line.ops & other
        if shared.names:
            op = next(iter(shared))
            raise PlanError(
                f"{op.name} is in block {name!r} already", place=op.place, remedy="put an op into one block only"
            )
    return replace(state, blocks={**state.blocks, line.name: line.ops})


def _stage(state: State, line: StageLine, context: Context) -> State:
    what = f"stage {line.name!r}"
    _check_devices(f"{what} cannot live", line.devices, context, what, "name existing devices, each once")
    stages = dict(state.stages)
    for op in line.ops:
        if op.name in stages:
            raise PlanError(
                f"{op.name} is in stage {stages[op.name].name!r} already", place=op.place, remedy="name each op once"
            )
        told = state.decisions.get(op.name)
        if told is not None and told.devices is not None and max(told.devices) >= len(line.devices):
            raise PlanError(
                f"{op.name} was assigned device {max(told.devices)}, but stage {line.name!r} has {len(line.devices)}",
                place=op.place,
                remedy="devices of ops in a stage are counted from 0 inside it",
            )
        stages[op.name] = Stage(line.name, line.devices)
    return replace(state, stages=stages)


def _batch(state: State, line: BatchLine) -> State:
    known = state.microbatches
    if not is_count(line.count):
        raise PlanError(f"{line.count!r} micro-batches are none", remedy="give a whole number of at least 1")
    if known not in (1, line.count):
        raise PlanError(f"the batch was cut into {known} before and into {line.count} now", remedy="cut it once")
    return replace(state, microbatches=line.count)


def _schedule(state: State, line: ScheduleLine) -> State:
    if state.schedule not in ("", line.schedule):
        raise PlanError("the order of a step was said twice", place=str(line), remedy="say it once")
    return replace(state, schedule=line.schedule)

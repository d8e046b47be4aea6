"""Plan files: a Plan as YAML, addressed by module path and wildcard.

    weft_plan: 1
    model: GPT              the graph's name, and what its ops are (`fingerprint`)
    devices: 4
    lines: [{trans: [ops ...], do: [{cut: n, parts: 2, axis: tp}]}, {assign: ..., devices: [...]}, ...]

In: a Plan. Out: a file, written whole or not at all. Reading it back for the same graph gives an equal Plan; for
another graph it is refused, with the first op that differs. Lines pass through the same checks as primitives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from weft.errors import PlanError
from weft.ir.graph import Graph
from weft.ir.schedule import PHASES, Before, Event, Micro, Rows, Schedule, ScheduleLike
from weft.plan.lines import (
    AssignLine,
    BatchLine,
    BlockLine,
    Line,
    OrderLine,
    ScheduleLine,
    StageLine,
    StoreLine,
    TransLine,
)
from weft.plan.plan import Plan
from weft.plan.primitives import CopyOver, CutBy, RecomputeMark, Transform, algorithm, before, copy, cut, placed
from weft.plan.select import Selection, fold

VERSION = 1
SUFFIXES = (".yaml", ".yml")
ENDS = f"the names of plan files end in {' or '.join(SUFFIXES)}"
KINDS = {int: "whole number", list: "list"}
"""What the types of fields are called in errors."""


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file; an older file stays until the new one is whole."""
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise PlanError(
            f"{str(target)!r} is no name to load a plan by: {ENDS}", remedy=str(target.with_suffix(SUFFIXES[0]))
        )
    if not target.parent.is_dir():
        raise PlanError(f"there is no directory {target.parent}", remedy="make it, or save the plan elsewhere")
    content = {
        "weft_plan": VERSION,
        "model": plan.graph.name,
        "devices": plan.devices,
        "lines": [_line_data(line) for line in plan.lines],
    }
    text = yaml.safe_dump(content, sort_keys=False, width=120, default_flow_style=None)
    text += yaml.safe_dump({"fingerprint": fingerprint(plan.graph)}, sort_keys=False, width=120)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


def fingerprint(graph: Graph) -> dict[str, str]:
    """The ops of a graph, layers folded: how many there are of each, their operator and the shapes they make."""
    found: dict[str, dict[str, int]] = {}
    for op in graph.ops:
        shapes = ", ".join("x".join(map(str, graph.tensors[name].shape)) or "scalar" for name in op.outputs)
        kinds = found.setdefault(fold(op.name), {})
        text = f"{op.target} -> {shapes}"
        kinds[text] = kinds.get(text, 0) + 1
    return {name: "; ".join(f"{n} x {text}" for text, n in kinds.items()) for name, kinds in found.items()}


def read_plan(path: Path, graph: Graph) -> Plan:
    """Read a plan file for this graph."""
    if not path.is_file():
        raise PlanError(f"there is no plan file {path}", remedy="check the path, or write a recipe such as dp=2")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is not readable as YAML: {error}", remedy="save the plan again") from None
    if not isinstance(data, Mapping) or data.get("weft_plan") != VERSION:
        found = data.get("weft_plan") if isinstance(data, Mapping) else None
        raise PlanError(
            f"{path} is no plan file of version {VERSION} (weft_plan: {found})", remedy="write it with save_plan"
        )
    _check_model(data, graph, path)
    with placed(str(path)):
        plan, lines = Plan(graph, _field(data, "devices", int)), _field(data, "lines", list)
    for number, entry in enumerate(lines, 1):
        place = f"{path}, line {number} of the plan"
        try:
            plan = _add(plan, entry)
        except PlanError as error:
            raise PlanError(error.message, place=f"{place}; {error.place}".strip("; "), remedy=error.remedy) from None
    return plan


def _check_model(data: Mapping[str, Any], graph: Graph, path: Path) -> None:
    saved, now = data.get("fingerprint"), fingerprint(graph)
    if saved == now:
        return
    names = (
        f"the plan is for {data.get('model')}, the model is {graph.name}; " if data.get("model") != graph.name else ""
    )
    raise PlanError(
        f"{path} is a plan for another model: {names}{_difference(saved, now)}",
        place=str(path),
        remedy="plan this model anew, or load the plan with the model and example it was made for",
    )


def _difference(saved: object, now: Mapping[str, str]) -> str:
    if not isinstance(saved, Mapping):
        return "it has no fingerprint"
    for name, text in saved.items():
        if name not in now:
            return f"the model has no op {name} ({text})"
        if now[name] != text:
            return f"{name} was {text}, is {now[name]}"
    extra = next((name for name in now if name not in saved), None)
    return f"the plan knows no op {extra}" if extra else "the ops stand in another order"


def _field(data: Mapping[str, Any], key: str, kind: type) -> Any:
    value = data.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise PlanError(
            f"{key!r} is {value!r}, which is no {KINDS[kind]}",
            remedy="save the plan again",
        )
    return value


# --- lines ------------------------------------------------------------------------------------------------------


def _line_data(line: Line) -> dict[str, Any]:
    match line:
        case TransLine(ops, transforms):
            return {"trans": _ops_data(ops), "do": [_transform_data(one) for one in transforms]}
        case AssignLine(ops, devices):
            return {"assign": _ops_data(ops), "devices": list(devices)}
        case StoreLine():
            return _store_data(line)
        case OrderLine(relations):
            return {"order": [[_event_data(one.first), _event_data(one.second)] for one in relations]}
        case StageLine(name, ops, devices):
            return {"stage": name, "ops": _ops_data(ops), "devices": list(devices)}
        case BatchLine(count):
            return {"microbatches": count}
        case ScheduleLine(schedule):
            return {"schedule": _schedule_data(schedule)}
        case BlockLine(name, ops):
            return {"block": name, "ops": _ops_data(ops)}


def _store_data(line: StoreLine) -> dict[str, Any]:
    if line.devices is not None:
        return {"store": line.parameters.text, "on": list(line.devices)}
    data: dict[str, Any] = {"store": line.parameters.text, "do": [_transform_data(one) for one in line.transforms]}
    if line.state is None:
        return data
    state = [_transform_data(one) for one in line.state]
    return {**data, **({"grad": state} if line.reduced else {}), "state": state}


def _schedule_data(schedule: ScheduleLike) -> str | dict[int, Any]:
    if isinstance(schedule, str):
        return schedule
    if not isinstance(schedule, Schedule | Mapping):
        raise PlanError(
            "a schedule that a function makes cannot be written to a file",
            remedy="order by a name, or by the events of every device",
        )
    rows = schedule.events if isinstance(schedule, Schedule) else schedule
    return {
        device: row if isinstance(row, str) else [_event_data(event) for event in row] for device, row in rows.items()
    }


def _ops_data(ops: Selection) -> str | list[str]:
    """The selection's text; a plain union as a list, one term each."""
    plain = not any(token in ops.text for token in ("(", " - ", " & ", "'"))
    return ops.text.split(" | ") if plain and " | " in ops.text else ops.text


def _transform_data(transform: Transform) -> dict[str, Any] | str:
    match transform:
        case RecomputeMark():
            return "recompute"
        case CopyOver(parts, axis):
            return {"copy": parts, "axis": axis}
        case CutBy(name, shares, axis, groups, units, kind, copies):
            sizes: int | list[int] = len(shares) if set(shares) == {1} else list(shares)
            data: dict[str, Any] = {"cut": name, "parts": sizes, "axis": axis}
            if groups != 1:
                data["groups"] = groups if isinstance(groups, int) else list(groups)
            if units is not None:
                data["units"] = units
            if copies != 1:
                data["copies"] = copies
            return {**data, "algorithm": kind} if kind else data


def _event_data(event: Event) -> list[Any]:
    return [event.phase, event.segment, event.micro if isinstance(event.micro, int) else str(event.micro)]


def _add(plan: Plan, entry: object) -> Plan:
    match entry:
        case {"trans": ops, "do": transforms}:
            return plan.trans(_ops(ops), *_transforms(transforms))
        case {"assign": ops, "devices": devices}:
            return plan.assign(_ops(ops), devices)
        case {"store": str(parameters), "do": transforms, **rest}:
            grad, state = (_transforms(rest[key]) if key in rest else None for key in ("grad", "state"))
            return plan.store(parameters, *_transforms(transforms), grad=grad, state=state)
        case {"store": str(parameters), "on": list(devices)}:
            return plan.store(parameters, on=devices)
        case {"order": list(pairs)}:
            return plan.order(*(_relation(pair) for pair in pairs))
        case {"block": str(name), "ops": ops}:
            return plan.block(name, _ops(ops))
    return _add_step(plan, entry)


def _add_step(plan: Plan, entry: object) -> Plan:
    """A line about how a step runs."""
    match entry:
        case {"stage": str(name), "ops": ops, "devices": list(devices)}:
            return plan.stage(name, _ops(ops), devices)
        case {"microbatches": int(count)}:
            return plan.cut_batch(count)
        case {"schedule": str(name)}:
            return plan.order(name)
        case {"schedule": dict(devices)}:
            return plan.order(_schedule(devices))
    lines = "trans, assign, store, order, block, stage, microbatches, schedule"
    raise PlanError(f"{entry!r} is no line of a plan", remedy=f"lines: {lines}")


def _schedule(data: Mapping[Any, Any]) -> Schedule | Rows:
    """Events by device: `0: [[f, a, 0], [b, a, 0]]`, or `0: F0 B0`."""
    if all(isinstance(device, int) and isinstance(row, str) for device, row in data.items()):
        return dict(data)
    found = {}
    for device, events in data.items():
        if not isinstance(device, int) or not isinstance(events, list):
            raise PlanError(f"{device!r}: {events!r} is no row of events", remedy="write 0: [[f, a, 0]]")
        found[device] = tuple(_event(list(event)) for event in events)
    return Schedule(found)


def _ops(data: object) -> str:
    if isinstance(data, list):
        return " | ".join(map(str, data))
    if isinstance(data, str):
        return data
    raise PlanError(f"{data!r} selects no ops", remedy="write a pattern or a list of patterns")


def _transforms(data: object) -> list[Transform]:
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise PlanError(f"{data!r} is no list of transforms", remedy="write do: [{cut: n, parts: 2}]")
    return [_transform(one) for one in data]


def _transform(data: Any) -> Transform:
    match data:
        case "recompute":
            return RecomputeMark()
        case {"copy": parts, "axis": axis}:
            return copy(parts, axis)
        case {"cut": name, "parts": parts, "axis": axis, "algorithm": kind}:
            return algorithm(kind, name, parts, axis)
        case {"cut": name, "parts": parts, "axis": axis}:
            more = {key: data[key] for key in ("groups", "units", "copies") if key in data}
            return cut(name, parts, axis, **more)
    raise PlanError(f"{data!r} is no transform", remedy="write {cut: n, parts: 2, axis: tp}")


def _relation(data: Any) -> Before:
    match data:
        case [[str(), str(), _] as first, [str(), str(), _] as second]:
            return before(_event(first), _event(second))
    raise PlanError(f"{data!r} relates no two events", remedy="write [[f, a, m+2], [b, a, m]]")


def _event(data: list[Any]) -> Event:
    phase, block, micro = data
    number: int | Micro | None = micro if isinstance(micro, int) else None
    if isinstance(micro, str) and micro.startswith("m") and (micro == "m" or micro[1:].lstrip("+-").isdigit()):
        number = Micro(int(micro[1:] or 0))
    if phase not in PHASES or number is None:
        raise PlanError(f"{data!r} is no event", remedy="write [f, block, 0] or [b, block, m+2]")
    return Event(phase, block, number)

"""Stages, micro-batches and the order of a step, as lines of a plan.

    StageLine    := name, ops, devices          the ops run there as they would on devices 0 .. k - 1
    BatchLine    := number of micro-batches
    ScheduleLine := a name, a Schedule, or a function that makes one of a Pipeline

In: what was said before and the next line. Out: what is said then, or a PlanError that says what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weft.errors import PlanError
from weft.ir.schedule import Event, Pipeline, Schedule
from weft.plan.primitives import is_count
from weft.plan.select import Selection

Rows = Mapping[int, str | Sequence[Event]]
"""For each device its events, or a row such as `F0 F1 B0` (`F0(a)` where it holds several stages)."""
ScheduleLike = str | Schedule | Rows | Callable[[Pipeline], Schedule | Rows]
"""A name of `weft.order.NAMES`, the events of every device by stage, or a function that makes them."""


class Placed(Protocol):
    """What was said of an op before."""

    @property
    def devices(self) -> tuple[int, ...] | None: ...


@dataclass(frozen=True)
class Stage:
    """Where an op's stage lives: device i of what it would run on is devices[i]."""

    name: str
    devices: tuple[int, ...]


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


def staged(
    known: Mapping[str, Stage], line: StageLine, devices: int, decisions: Mapping[str, Placed]
) -> Mapping[str, Stage]:
    """The stages with one more."""
    place = f"stage {line.name!r}"
    missing = [device for device in line.devices if not 0 <= device < devices]
    if missing or not line.devices or len(set(line.devices)) < len(line.devices):
        raise PlanError(
            f"stage {line.name!r} cannot live on devices {list(line.devices)}: the plan has devices 0 to {devices - 1}",
            place=place,
            remedy="name existing devices, each once",
        )
    found = dict(known)
    for op in line.ops:
        if op.name in found:
            raise PlanError(
                f"{op.name} is in stage {found[op.name].name!r} already", place=op.place, remedy="name each op once"
            )
        told = decisions.get(op.name)
        if told is not None and told.devices is not None and max(told.devices) >= len(line.devices):
            raise PlanError(
                f"{op.name} was assigned device {max(told.devices)}, but stage {line.name!r} has {len(line.devices)}",
                place=op.place,
                remedy="devices of ops in a stage are counted from 0 inside it",
            )
        found[op.name] = Stage(line.name, line.devices)
    return found


def batched(known: int, line: BatchLine) -> int:
    """The number of micro-batches."""
    if not is_count(line.count):
        raise PlanError(f"{line.count!r} micro-batches are none", remedy="give a whole number of at least 1")
    if known not in (1, line.count):
        raise PlanError(f"the batch was cut into {known} before and into {line.count} now", remedy="cut it once")
    return line.count


def scheduled(known: ScheduleLike, line: ScheduleLine) -> ScheduleLike:
    """The schedule."""
    if known not in ("", line.schedule):
        raise PlanError("the order of a step was said twice", place=str(line), remedy="say it once")
    return line.schedule

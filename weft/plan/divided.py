"""What a plan divides: the share of the work that devices do between them, and the rest by name.

In: a Plan. Out: a Divided: of the floating-point work and of the memory traffic of one forward, what is divided, from 0
(every device does all of it) to 1 (nothing is done twice); and every op that is done more than once, the heaviest
first, with the reason. An op that n of D devices each run whole counts as divided by (D - n) / (D - 1). Parts that run
one after the other on one device divide nothing between devices, nor does an op that runs on addends of full size.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from weft.ir.oplayout import Carried, Cut, OpLayout
from weft.ops.rule import Rule
from weft.ops.work import Work, work_of
from weft.plan.follow import resolve
from weft.plan.plan import Plan
from weft.plan.select import fold


@dataclass(frozen=True)
class Rest:
    """An op, or the same one in several layers, that devices do not fully divide.

    Args:
        op: its name; numbers are wildcards where layers are folded.
        flops_share, bytes_share: of the whole model, what is not divided of it.
    """

    op: str
    operator: str
    line: str
    flops_share: float
    bytes_share: float
    why: str
    count: int = 1

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "count"}


@dataclass(frozen=True)
class Divided:
    """What a plan divides between its devices."""

    devices: int
    flops_share: float
    bytes_share: float
    rest: tuple[Rest, ...]

    @property
    def folded(self) -> tuple[Rest, ...]:
        """The rest, with layers that repeat in one."""
        groups: dict[tuple[str, str], list[Rest]] = {}
        for one in self.rest:
            groups.setdefault((fold(one.op), one.why), []).append(one)
        return _heaviest_first([_together(name, group) for (name, _), group in groups.items()])


def divided(plan: Plan) -> Divided:
    """What the plan divides."""
    layouts = resolve(plan, plan.rules)
    works = {op.name: work_of(op, plan.rule(op), plan.graph) for op in plan.graph.ops}
    total = sum(works.values(), Work())
    rest = []
    for op in plan.graph.ops:
        whole = _undivided(layouts[op.name], plan.devices)
        work = works[op.name]
        if whole and (work.flops or work.bytes):
            flops, traffic = _share(whole * work.flops, total.flops), _share(whole * work.bytes, total.bytes)
            why = _why(plan.rule(op), layouts[op.name], plan.devices)
            rest.append(Rest(op.name, op.kind, op.line, flops, traffic, why))
    flops, traffic = (math.fsum(getattr(one, name) for one in rest) for name in ("flops_share", "bytes_share"))
    return Divided(plan.devices, 1.0 - flops, 1.0 - traffic, _heaviest_first(rest))


def _undivided(layout: OpLayout, devices: int) -> float:
    """From 0, if no two devices do the same work for an op, to 1, if all do all of it."""
    parts = math.prod(
        axis.size for axis, use in zip(layout.grid.axes, layout.uses, strict=True) if isinstance(use, Cut)
    )
    if devices == 1:
        return 1.0
    times = len(layout.grid.devices) / parts
    return (times - 1) / (devices - 1)


def _why(rule: Rule, layout: OpLayout, devices: int) -> str:
    if devices == 1:
        return "there is one device"
    if rule.source == "none":
        return "no rule"
    names = [name for name in rule.cuttable if rule.sizes[name] > 1]
    if not names:
        return "nothing in it to cut"
    if any(isinstance(use, Carried) for use in layout.uses):
        return "every device has addends of full size"
    if any(isinstance(use, Cut) for use in layout.uses):
        return "not cut along all axes"
    return f"left whole; may be cut along {', '.join(names)}"


def _together(name: str, group: list[Rest]) -> Rest:
    flops, traffic = sum(one.flops_share for one in group), sum(one.bytes_share for one in group)
    first = group[0]
    op = name if len(group) > 1 else first.op
    return Rest(op, first.operator, first.line, flops, traffic, first.why, len(group))


def _heaviest_first(rest: list[Rest]) -> tuple[Rest, ...]:
    return tuple(sorted(rest, key=lambda one: (-one.flops_share, -one.bytes_share)))


def _share(part: float, whole: int) -> float:
    return part / whole if whole else 0.0

"""What a plan does to a model, in a few numbers: operators, what each axis cuts, what nobody cuts, what was proven.

In: a Program and the Report of its check, or a Pipeline and its Schedule. Out: plain values for printing and for
`--json`. Promised: an operator that several devices each run whole, on the same values, is named, unless it is the same
in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.ir.graph import Graph, Op
from weft.ir.oplayout import Copied, Cut, OpLayout
from weft.ir.program import Compute, Program, walk
from weft.ir.schedule import Pipeline, Schedule, row
from weft.lower.check import Report
from weft.ops.book import RuleBook
from weft.ops.coverage import coverage, unruled_warnings
from weft.order import Span, simulate

OURS = "all"
"""The axis that the plan gives to operators nobody told anything."""
HEAVY = ("linear", "mm", "matmul", "bmm", "einsum", "conv", "embedding", "attention", "rnn", "lstm", "gru")
"""Parts of the names of operators that cost most of a model's time."""


@dataclass(frozen=True)
class WholeOps:
    """Operators of one kind that several devices run whole: how many, the first of them and its line."""

    kind: str
    count: int
    first: str
    source: str
    reason: str
    heavy: bool


def summarize(program: Program, report: Report) -> dict[str, Any]:
    """Numbers about a Program."""
    return {
        "operators": len(program.graph.ops),
        "axes": axes_of(program),
        "whole": [asdict(group) for group in whole_ops(program)],
        "warnings": unruled_warnings(coverage(program.graph).kinds) if program.devices > 1 else [],
        "check": asdict(report),
        "proven": str(report),
    }


def summarize_pieces(pipeline: Pipeline, schedule: Schedule, spans: Mapping[str, Span], graph: Graph) -> dict[str, Any]:
    """Numbers about a pipeline. `spans`: how long the phases of each piece take, as was estimated."""
    return {
        "operators": len(graph.ops),
        "axes": {},
        "whole": [],
        "warnings": unruled_warnings(coverage(graph).kinds) if len(schedule.events) > 1 else [],
        "pieces": [asdict(segment) for segment in pipeline.segments],
        "microbatches": pipeline.microbatches,
        "schedule": {str(device): row(events) for device, events in sorted(schedule.events.items())},
        "idle": simulate(pipeline, schedule).idle,
        "idle_estimated": simulate(pipeline, schedule, spans).idle,
    }


def axes_of(program: Program) -> dict[str, Any]:
    """For each axis its size, and how many operators of which kind it cuts.

    The axis of operators that were told nothing, and so are copied, is of our own making: it is left out.
    """
    sizes: dict[str, int] = {}
    kinds: dict[str, Counter[str]] = {}
    for step in walk(program.steps):
        if not isinstance(step, Compute):
            continue
        for axis, use in zip(step.layout.grid.axes, step.layout.uses, strict=True):
            sizes.setdefault(axis.name, axis.size)
            counter = kinds.setdefault(axis.name, Counter())
            if isinstance(use, Cut):
                counter[program.graph.by_name[step.op].kind] += 1
    return {
        name: {"size": size, "cut": sum(kinds[name].values()), "kinds": dict(kinds[name].most_common())}
        for name, size in sizes.items()
        if kinds[name] or name != OURS
    }


def whole_ops(program: Program) -> list[WholeOps]:
    """What is not cut though it runs on several devices: heavy operators first, then the most frequent."""
    book, groups = RuleBook(program.graph), dict[tuple[str, str], list[Op]]()
    for step in walk(program.steps):
        if isinstance(step, Compute) and _runs_whole(step.layout):
            op = program.graph.by_name[step.op]
            if not op.constant:
                reason = "no rule" if book.rule(op).source == "none" else ""
                groups.setdefault((op.kind, reason), []).append(op)
    found = [
        WholeOps(kind, len(ops), ops[0].name, _line(ops[0]), reason, _is_heavy(ops[0]))
        for (kind, reason), ops in groups.items()
    ]
    return sorted(found, key=lambda group: (not group.heavy, not group.reason, -group.count))


def _runs_whole(layout: OpLayout) -> bool:
    """True if several devices run the op on the same values. An op that carries addends has its own on each."""
    several = len(set(layout.grid.devices)) > 1
    return several and all(
        isinstance(use, Copied) or axis.size == 1 for axis, use in zip(layout.grid.axes, layout.uses, strict=True)
    )


def _is_heavy(op: Op) -> bool:
    return op.function is not None or any(word in op.kind for word in HEAVY)


def _line(op: Op) -> str:
    return f"{Path(op.source.file).name}:{op.source.line}" if op.source.line else ""

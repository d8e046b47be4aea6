"""What a plan does to a model, in a few numbers: operators, what each axis cuts, what the check proved.

In: a Program and the Report of its check. Out: plain values for printing and for `--json`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from weft.ir.oplayout import Cut
from weft.ir.program import Compute, Program
from weft.lower.check import Report
from weft.verify.locate import walk


def summarize(program: Program, report: Report) -> dict[str, Any]:
    """Numbers about a Program."""
    return {
        "operators": len(program.graph.ops),
        "axes": axes_of(program),
        "check": asdict(report),
        "proven": str(report),
    }


def axes_of(program: Program) -> dict[str, Any]:
    """For each axis its size, and how many operators of which kind it cuts."""
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
    }

"""Spent values: what its only reader may write over.

In: a Program. Out: the values that one step reads and nobody after it, whose memory is their own, and which backward of
what made them does not look at. A loss may turn such scores into what it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.ir.program import Chunks, Compute, Program, Recompute, Step
from weft.ops.arguments import family

FRESH = frozenset(f"aten.{name}" for name in ("linear", "mm", "addmm", "matmul", "bmm", "baddbmm", "add", "sub", "mul"))
"""Operators that make a tensor and do not keep it."""
PASSING = frozenset(
    f"aten.{name}" for name in ("reshape", "view", "flatten", "unflatten", "to", "contiguous", "slice", "alias")
)
"""Operators that give a tensor on, or a copy of it."""


def spent_values(program: Program) -> frozenset[str]:
    """The values that the step which reads them may write over."""
    reads = program.reads
    return frozenset(name for steps in _lists(program.steps) for name in _spent(steps, program) if reads[name] == 1)


def _lists(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """The steps, and those of each body: what crosses from one to another is not followed."""
    yield steps
    for step in steps:
        if isinstance(step, Chunks | Recompute):
            yield from _lists(step.body)


def _spent(steps: Sequence[Step], program: Program) -> set[str]:
    found: set[str] = set()
    for step in steps:
        if not isinstance(step, Compute) or len(step.outputs) != 1:
            continue
        op = program.graph.by_name[step.op]
        passed = family(op) in PASSING and step.inputs[0] in found and program.reads[step.inputs[0]] == 1
        if (family(op) in FRESH and op.function is None) or passed:
            found.update(step.outputs)
    return found

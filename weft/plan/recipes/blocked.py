"""Why tensor parallelism finds nothing to cut.

In: a plan, a number of parts. Out: what stands in the way of the largest product, name by name, and its line.
"""

from __future__ import annotations

from weft.ir.graph import Op
from weft.ops.work import contraction
from weft.plan.batch import where_of
from weft.plan.colors import Color, OpName, find_inner_colors
from weft.plan.plan import Plan


def largest_product(plan: Plan) -> Op | None:
    """The op with the most multiplications; None if there is none."""
    found = {op.name: contraction(op, plan.rule(op), plan.graph) for op in plan.graph.ops}
    largest = max(plan.graph.ops, key=lambda op: found[op.name], default=None)
    return largest if largest is not None and found[largest.name] else None


def why_whole(plan: Plan, op: Op, parts: int) -> str:
    """What is said of each name of the op's rule."""
    colors = find_inner_colors(plan.graph, plan.rules, parts)
    rule = plan.rule(op)
    said = [
        f"{_shown(name, size)} {_why(plan, op, name, size, colors.at(OpName(op.name, name)), parts)}"
        for name, size in rule.sizes.items()
        if size > 1
    ]
    return "; ".join(said)


def _shown(name: str, size: int) -> str:
    return f"{name} ({size})"


def _why(plan: Plan, op: Op, name: str, size: int, color: Color | None, parts: int) -> str:
    if size < parts:
        return f"is less than {parts}"
    if name in plan.rule(op).frozen:
        return "is needed whole by this operator"
    inputs = [] if color is None else [one.tensor for one in plan.graph.inputs if one.tensor in color.dims]
    if inputs:
        return f"is a dim of the input {where_of(plan.graph, inputs[0])} and of no weight"
    return "is cut already, or lies inside a dim that is needed whole"

"""The table of rules: the rule of any op that weft itself knows.

In: an op. Out: its Rule, looked up by family (the target without overload) in the tables of the rule modules, each of
which holds a `RULES`; an operator that stands in none of them may be pointwise. One that is found nowhere has no rule.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import RuleError
from weft.ir.graph import Graph, Op
from weft.ops import (
    attention,
    distances,
    embedding,
    experts,
    indexing,
    linalg,
    losses,
    matmul,
    norms,
    pieces,
    pointwise,
    random_ops,
    reductions,
    views,
    windows,
)
from weft.ops.arguments import family
from weft.ops.build import OpView, RuleOf
from weft.ops.rule import Rule

RULES: Mapping[str, RuleOf] = {
    **attention.RULES,
    **distances.RULES,
    **embedding.RULES,
    **experts.RULES,
    **indexing.RULES,
    **linalg.RULES,
    **losses.RULES,
    **matmul.RULES,
    **norms.RULES,
    **pieces.RULES,
    **pointwise.RULES,
    **random_ops.RULES,
    **reductions.RULES,
    **views.RULES,
    **windows.RULES,
}
"""All rules by operator."""


def rule_for(op: Op, graph: Graph) -> Rule:
    """How an op may be cut. Refused, with the user's line, if nobody has said."""
    it = OpView.of(op, graph)
    found = _find(op)
    if found is None:
        raise it.error(f"no rule says how {op.target} may be cut")
    return found(it)


def look_up(it: OpView) -> Rule | None:
    """What the table says of an op, with these arguments; None if it says nothing."""
    found = _find(it.op)
    try:
        return None if found is None else found(it)
    except RuleError:
        return None


def _find(op: Op) -> RuleOf | None:
    return RULES.get(family(op)) or (pointwise.pointwise_rule if pointwise.is_pointwise(op) else None)

"""The table of rules: the rule of any op that weft itself knows.

In: an op. Out: its Rule, looked up by family (the target without overload) in the tables of the rule modules, each of
which holds a `RULES`; an operator that stands in none of them may be pointwise. One that is found nowhere has no rule.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import RuleError
from weft.ir.graph import Graph, Op
from weft.ops.arguments import family
from weft.ops.build import OpView, RuleOf
from weft.ops.rule import Rule
from weft.ops.rules.attention import RULES as ATTENTION
from weft.ops.rules.distances import RULES as DISTANCES
from weft.ops.rules.embedding import RULES as EMBEDDING
from weft.ops.rules.experts import RULES as EXPERTS
from weft.ops.rules.indexing import RULES as INDEXING
from weft.ops.rules.linalg import RULES as LINALG
from weft.ops.rules.losses import RULES as LOSSES
from weft.ops.rules.matmul import RULES as MATMUL
from weft.ops.rules.norms import RULES as NORMS
from weft.ops.rules.pieces import RULES as PIECES
from weft.ops.rules.pointwise import RULES as POINTWISE
from weft.ops.rules.pointwise import is_pointwise, pointwise_rule
from weft.ops.rules.random import RULES as RANDOM
from weft.ops.rules.reductions import RULES as REDUCTIONS
from weft.ops.rules.views import RULES as VIEWS
from weft.ops.rules.windows import RULES as WINDOWS

RULES: Mapping[str, RuleOf] = {
    **ATTENTION,
    **DISTANCES,
    **EMBEDDING,
    **EXPERTS,
    **INDEXING,
    **LINALG,
    **LOSSES,
    **MATMUL,
    **NORMS,
    **PIECES,
    **POINTWISE,
    **RANDOM,
    **REDUCTIONS,
    **VIEWS,
    **WINDOWS,
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
    return RULES.get(family(op)) or (pointwise_rule if is_pointwise(op) else None)

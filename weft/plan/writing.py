"""What recipes share: one line per distinct cut, and what they say when there is nothing to cut.

In: a Plan and the cuts of its ops, or what was looked for in vain. Out: the Plan with more lines, or the error.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import PlanError
from weft.plan.plan import Plan
from weft.plan.primitives import CutBy, is_count

SHOWN = 3
"""So many operators are named in an error."""


def cut_all(plan: Plan, cuts: Mapping[str, CutBy]) -> Plan:
    """One line per distinct cut."""
    lines: dict[CutBy, list[str]] = {}
    for op, cut in cuts.items():
        lines.setdefault(cut, []).append(op)
    for cut, ops in lines.items():
        plan = plan.trans(ops, cut)
    return plan


def check_count(what: str, parts: int) -> None:
    if not is_count(parts):
        raise PlanError(f"{what}={parts!r} is no number of parts", remedy="give a whole number of at least 1")


def no_chain(plan: Plan, what: str, parts: int) -> PlanError:
    message = (
        f"{what}: {plan.graph.name} has no inner dim (features, heads, channels, vocabulary) that a multiplication "
        f"uses and that falls into {parts} parts"
    )
    return nothing_to_cut(plan, message, "", "use fewer parts, or cut ops by hand with plan.trans")


def nothing_to_cut(plan: Plan, message: str, place: str, remedy: str) -> PlanError:
    """A recipe found nothing to cut: because some operators have no rule, or for another reason."""
    unruled = {op.kind: op for op in reversed(plan.rules.unruled())}
    if not unruled:
        return PlanError(message, place=place, remedy=remedy)
    kinds = sorted(unruled, key=lambda kind: plan.graph.ops.index(unruled[kind]))
    missing = f"{', '.join(kinds[:SHOWN])}{' ...' if len(kinds) > SHOWN else ''}"
    verb = "has" if len(kinds) == 1 else "have"
    return PlanError(
        f"{message}: {missing} {verb} no rule, so every device computes the whole of it",
        place=unruled[kinds[0]].place,
        remedy="write it with plain operators (linear, sigmoid, tanh ...), or cut other ops by hand with plan.trans",
    )

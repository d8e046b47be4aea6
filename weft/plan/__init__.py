"""Plans: decisions about a Graph, the primitives that write them, recipes, plan files."""

from weft.plan.load import load_plan
from weft.plan.megatron import megatron
from weft.plan.order import Micro, b, before, f, w
from weft.plan.plan import AxisUse, Decision, Plan, Store, Verdict
from weft.plan.plan_file import save_plan
from weft.plan.primitives import algorithm, copy, cut, recompute
from weft.plan.recipes import coshard, dp, tp
from weft.plan.select import Selection, match
from weft.plan.sequence import sp
from weft.plan.spread import spread
from weft.plan.zero import zero

__all__ = [
    "AxisUse",
    "Decision",
    "Micro",
    "Plan",
    "Selection",
    "Store",
    "Verdict",
    "algorithm",
    "b",
    "before",
    "copy",
    "coshard",
    "cut",
    "dp",
    "f",
    "load_plan",
    "match",
    "megatron",
    "recompute",
    "save_plan",
    "sp",
    "spread",
    "tp",
    "w",
    "zero",
]

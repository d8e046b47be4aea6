"""Plans: decisions about a Graph, the primitives that write them, recipes, plan files."""

from weft.ir.schedule import Micro
from weft.plan.load import load_plan
from weft.plan.plan import AxisUse, Decision, Plan, Store, Verdict
from weft.plan.plan_file import save_plan
from weft.plan.primitives import algorithm, b, before, copy, cut, f, recompute, w
from weft.plan.recipes.basic import coshard, dp, tp
from weft.plan.recipes.megatron import megatron
from weft.plan.recipes.sequence import sp
from weft.plan.recipes.stores import spread, zero
from weft.plan.select import Selection, match

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

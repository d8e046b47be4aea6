"""Plans: decisions about a Graph, the primitives that write them, recipes, plan files."""

from weft.ir.schedule import Micro
from weft.plan.basic import coshard, dp, tp
from weft.plan.load import load_plan
from weft.plan.megatron import megatron
from weft.plan.plan import AxisUse, Decision, Plan, Store, Verdict
from weft.plan.plan_file import save_plan
from weft.plan.primitives import algorithm, b, before, copy, cut, f, recompute, w
from weft.plan.select import Selection, match
from weft.plan.sequence import sp
from weft.plan.stores import spread, zero

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

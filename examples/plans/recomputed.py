"""Recomputation: each block keeps its input only and runs again in backward, here with data parallelism."""

from weft import Plan, cut, recompute


def plan(plan: Plan) -> Plan:
    plan = plan.trans("tokens", cut(0, plan.devices, axis="dp"))
    for block in range(2):
        plan = plan.trans(f"blocks.{block}.**", recompute())
    return plan

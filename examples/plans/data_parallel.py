"""Data parallelism: the batch is cut where it comes in, all other operators follow."""

from weft import Plan, copy, cut


def plan(plan: Plan) -> Plan:
    dp = plan.devices
    plan = plan.trans("tokens", cut(0, dp, axis="dp"))
    return plan.trans("positions", copy(dp, axis="dp"))

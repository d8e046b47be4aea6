"""ZeRO-3: data parallel, parameters stored in parts, gathered where they are used, gradients scattered back."""

from weft import Plan, cut


def plan(plan: Plan) -> Plan:
    dp = plan.devices
    plan = plan.trans("tokens", cut(0, dp, axis="dp"))
    return plan.store("**", cut(0, dp, axis="dp"))

"""The vocabulary over all devices, each block data parallel on half of them: stages need not be disjoint."""

from weft import Plan, cut


def plan(plan: Plan) -> Plan:
    every, half = list(range(plan.devices)), plan.devices // 2
    plan = plan.trans("tokens", cut("v", plan.devices, axis="vocabulary")).assign("tokens", every)
    plan = plan.trans("head", cut("n", plan.devices, axis="vocabulary")).assign("head", every)
    for block, devices in enumerate((every[:half], every[half:])):
        first = f"blocks.{block}.norm1"
        plan = plan.trans(first, cut(0, half, axis="dp")).assign(first, devices)
    return plan

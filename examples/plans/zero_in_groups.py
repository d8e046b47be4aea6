"""ZeRO inside groups (MiCS, HSDP): two groups of replicas, each of which holds the parameters once, in parts."""

from weft import Plan, cut


def plan(plan: Plan) -> Plan:
    inner = plan.devices // 2
    plan = plan.trans("tokens", cut(0, 2, axis="group"), cut(0, inner, axis="member"))
    return plan.store("**", cut(0, inner, axis="member"))

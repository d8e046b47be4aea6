"""Data and tensor parallelism on a grid of two axes, parameters stored in parts over the replicas."""

from weft import Plan, cut


def plan(plan: Plan) -> Plan:
    tp = plan.devices // 2
    plan = plan.trans("tokens", cut(0, 2, axis="dp"))
    plan = plan.trans("blocks.*.attention.qkv", cut("n", tp, axis="tp", groups=3, units=4))
    plan = plan.trans("blocks.*.mlp.up", cut("n", tp, axis="tp"))
    plan = plan.trans("blocks.*.attention.out | blocks.*.mlp.down", cut("k", tp, axis="tp"))
    return plan.store("**.weight", cut(0, 2, axis="dp"))

"""Megatron by hand: heads, hidden units and vocabulary."""

from weft import Plan, cut


def plan(plan: Plan) -> Plan:
    tp = plan.devices
    plan = plan.trans("tokens", cut("v", tp, axis="tp"))
    # a third of the fused projection each for query, key and value: a part takes its heads of all three
    plan = plan.trans("blocks.*.attention.qkv", cut("n", tp, axis="tp", groups=3, units=4))
    plan = plan.trans("blocks.*.mlp.up", cut("n", tp, axis="tp"))
    plan = plan.trans("blocks.*.attention.out | blocks.*.mlp.down", cut("k", tp, axis="tp"))
    return plan.trans("head", cut("n", tp, axis="tp"))

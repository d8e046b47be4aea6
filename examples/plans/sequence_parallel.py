"""Megatron with sequence parallelism: between the blocks the sequence is cut instead of nothing."""

from weft import Plan, cut


def plan(plan: Plan) -> Plan:
    tp = plan.devices
    plan = plan.trans("tokens", cut("v", tp, axis="tp"))
    plan = plan.trans("blocks.*.attention.qkv", cut("n", tp, axis="tp", groups=3, units=4))
    plan = plan.trans("blocks.*.mlp.up", cut("n", tp, axis="tp"))
    plan = plan.trans("blocks.*.attention.out | blocks.*.mlp.down", cut("k", tp, axis="tp"))
    plan = plan.trans("head", cut("n", tp, axis="tp"))
    plan = plan.trans("positions", cut(0, tp, axis="tp"))
    between = plan.match("**", op=("layer_norm", "dropout", "add"))
    return plan.trans(between, cut(1, tp, axis="tp"))

"""A pipeline with more devices for its second stage, which is cut by heads and hidden units among them."""

from weft import Plan, cut


def plan(plan: Plan) -> Plan:
    ops = plan.match("**").names
    second = ops.index("blocks.1.norm1/layer_norm")
    wide = plan.devices - 1
    plan = plan.trans("blocks.1.attention.qkv", cut("n", wide, axis="tp", groups=3, units=4))
    plan = plan.trans("blocks.1.mlp.up", cut("n", wide, axis="tp"))
    plan = plan.trans("blocks.1.attention.out | blocks.1.mlp.down", cut("k", wide, axis="tp"))
    plan = plan.stage("first", ops[:second], [0]).stage("second", ops[second:], range(1, plan.devices))
    return plan.cut_batch(4).order("1f1b")

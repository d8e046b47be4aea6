"""A pipeline whose weight gradients wait for when a device has nothing else to do (zero bubble, ZB-H1)."""

from weft import Plan


def plan(plan: Plan) -> Plan:
    ops = plan.match("**").names
    second = ops.index("blocks.1.norm1/layer_norm")
    plan = plan.stage("first", ops[:second], [0]).stage("second", ops[second:], [1])
    return plan.cut_batch(4).order("zb-h1")

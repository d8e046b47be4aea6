"""A pipeline in an order of one's own: for each device its events, forward and backward, by micro-batch."""

from weft import Plan


def plan(plan: Plan) -> Plan:
    ops = plan.match("**").names
    second = ops.index("blocks.1.norm1/layer_norm")
    plan = plan.stage("first", ops[:second], [0]).stage("second", ops[second:], [1])
    return plan.cut_batch(3).order({0: "F0 F1 F2 B1 B0 B2", 1: "F1 F0 B1 B0 F2 B2"})

"""A pipeline: two stages, four micro-batches a step, each backward as soon as it can be (1F1B)."""

from weft import Plan


def plan(plan: Plan) -> Plan:
    ops = plan.match("**").names
    second = ops.index("blocks.1.norm1/layer_norm")
    plan = plan.stage("first", ops[:second], [0]).stage("second", ops[second:], [1])
    return plan.cut_batch(4).order("1f1b")

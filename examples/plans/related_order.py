"""A pipeline of which only some things are said: a solver completes relations between events to the shortest step."""

from weft import Plan, before
from weft.plan import Micro, b, f


def plan(plan: Plan) -> Plan:
    ops = plan.match("**").names
    second = ops.index("blocks.1.norm1/layer_norm")
    plan = plan.stage("first", ops[:second], [0]).stage("second", ops[second:], [1])
    m = Micro()
    # the first stage is two micro-batches ahead at most, the second one
    relations = before(b("first", m), f("first", m + 2)), before(b("second", m), f("second", m + 1))
    return plan.cut_batch(4).order(*relations)

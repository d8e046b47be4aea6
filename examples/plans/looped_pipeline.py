"""A pipeline that goes round twice: each device runs two stages, cut at any operator (interleaved 1F1B)."""

from weft import Plan


def plan(plan: Plan) -> Plan:
    ops = plan.match("**").names
    cuts = [len(ops) * quarter // 4 for quarter in range(5)]
    for number in range(4):
        plan = plan.stage(f"quarter {number}", ops[cuts[number] : cuts[number + 1]], [number % 2])
    return plan.cut_batch(4).order("interleaved")

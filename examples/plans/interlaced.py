"""A vocabulary that all devices share, woven into the stages of a pipeline, so that none of them waits for it."""

from weft import Plan, cut


def plan(plan: Plan) -> Plan:
    count = plan.devices
    plan = plan.trans("tokens", cut("v", count, axis="vocabulary"))
    plan = plan.trans("head", cut("n", count, axis="vocabulary"))
    inner = plan.match("blocks.**").names
    for stage in range(count):
        ops = inner[len(inner) * stage // count : len(inner) * (stage + 1) // count]
        plan = plan.stage(str(stage), ops, [stage])
    return plan.cut_batch(4).order("interlaced")

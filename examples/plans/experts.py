"""Expert parallelism by hand: each device holds some experts; what they make is weighted and summed."""

from weft import Plan, cut


def plan(plan: Plan) -> Plan:
    return plan.trans("experts/einsum*", cut("e", plan.devices, axis="ep"))

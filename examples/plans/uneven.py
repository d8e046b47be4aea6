"""Uneven parts: the last of three devices is slower and gets less."""

from weft import Plan, cut


def plan(plan: Plan) -> Plan:
    plan = plan.trans("blocks.*.attention.qkv", cut("n", [2, 1, 1], axis="tp", groups=3, units=4))
    plan = plan.trans("blocks.*.attention.out", cut("k", [2, 1, 1], axis="tp", units=4))
    plan = plan.trans("blocks.*.mlp.up", cut("n", [5, 2, 1], axis="tp"))
    return plan.trans("blocks.*.mlp.down", cut("k", [5, 2, 1], axis="tp"))

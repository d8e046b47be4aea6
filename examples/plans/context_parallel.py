"""Context parallelism with gathered keys: the sequence is cut everywhere, attention by its queries."""

from weft import Plan, cut


def plan(plan: Plan) -> Plan:
    cp = plan.devices
    plan = plan.trans("tokens | positions", cut(-2, cp, axis="cp"))
    plan = plan.trans(plan.match("**", op="linear"), cut(1, cp, axis="cp"))
    return plan.trans(plan.match("**", op="scaled_dot_product_attention"), cut("q", cp, axis="cp"))

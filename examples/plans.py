"""Plans written by hand for gpt.py and mlp.py: `weft verify examples/gpt.py --plan examples/plans.py:megatron`."""

from weft import Plan, cut


def megatron(plan: Plan) -> Plan:
    """Tensor parallelism by the book: heads and hidden units are cut, everything between follows."""
    tp = plan.devices
    # A third of the fused projection each for query, key and value: every part takes its heads of all three.
    plan = plan.trans(plan.match("blocks.*.attention.qkv"), cut("n", tp, axis="tp", groups=3, units=4))
    plan = plan.trans(plan.match("blocks.*.attention.out"), cut("k", tp, axis="tp"))
    plan = plan.trans(plan.match("blocks.*.mlp.up"), cut("n", tp, axis="tp"))
    return plan.trans(plan.match("blocks.*.mlp.down"), cut("k", tp, axis="tp"))


def uneven(plan: Plan) -> Plan:
    """Two neighbouring operators of the MLP in unequal shares over three devices."""
    plan = plan.trans("up", cut("n", [4, 3, 1], axis="a"))
    return plan.trans("down", cut("k", [1, 5, 2], axis="a"))


def stored_in_parts(plan: Plan) -> Plan:
    """Data parallelism with the weights stored in parts and gathered where they are used."""
    dp = plan.devices
    plan = plan.trans(plan.match("**", op="linear"), cut(0, dp, axis="dp"))
    return plan.store("*.weight", cut(0, dp, axis="dp"))

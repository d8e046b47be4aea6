"""Mixed grids in one model: the first block data parallel, the second tensor parallel, the head both."""

from weft import Plan, cut


def plan(plan: Plan) -> Plan:
    n, every = plan.devices, list(range(plan.devices))
    first = plan.match("blocks.0.**", op=("linear", "layer_norm"))
    plan = plan.trans(first, cut(0, n, axis="dp")).assign(first, every)
    for ops, name in (("blocks.1.mlp.up", "n"), ("blocks.1.mlp.down", "k")):
        plan = plan.trans(ops, cut(name, n, axis="tp")).assign(ops, every)
    grid = [every[: n // 2], every[n // 2 :]]
    return plan.trans("head", cut(0, 2, axis="rows"), cut("n", n // 2, axis="vocabulary")).assign("head", grid)

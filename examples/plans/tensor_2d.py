"""Two-dimensional tensor parallelism: every weight cut along its rows and its columns."""

from weft import Plan, cut


def plan(plan: Plan) -> Plan:
    columns = plan.devices // 2
    hidden = plan.match("blocks.*.mlp.**", op="linear") | plan.match("blocks.*.attention.out")
    return plan.trans(hidden, cut("k", 2, axis="rows"), cut("n", columns, axis="columns"))

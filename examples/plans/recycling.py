"""A model that runs its layers three times, twice without gradient: every pass on the same devices (3F1B)."""

from weft import Plan


def plan(plan: Plan) -> Plan:
    ops = plan.match("**").names
    starts = [ops.index(plan.match(f"recycled_row@{turn}").names[0]) for turn in range(3)]
    for turn, (start, end) in enumerate(zip([0, *starts[1:]], [*starts[1:], len(ops)], strict=True)):
        middle = ops.index(plan.match(f"blocks.1.rows.pair_norm@{turn}").names[0])
        plan = plan.stage(f"first half, pass {turn}", ops[start:middle], [0])
        plan = plan.stage(f"second half, pass {turn}", ops[middle:end], [1])
    return plan.cut_batch(2).order("nf1b")

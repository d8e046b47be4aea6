"""Co-shard: hidden units in four parts per device, one after the other and recomputed. Less memory, nothing sent."""

from weft import Plan, cut, recompute


def plan(plan: Plan) -> Plan:
    for block in range(2):
        up, down = f"blocks.{block}.mlp.up", f"blocks.{block}.mlp.down"
        plan = plan.trans(up, cut("n", 4 * plan.devices, axis="co"))
        plan = plan.trans(f"blocks.{block}.mlp/gelu", cut(2, 4 * plan.devices, axis="co"))
        plan = plan.trans(down, cut("k", 4 * plan.devices, axis="co"))
        chain = f"{up} | {down} | blocks.{block}.mlp/gelu"
        plan = plan.assign(chain, [device for device in range(plan.devices) for _ in range(4)])
        plan = plan.trans(chain, recompute())
    return plan

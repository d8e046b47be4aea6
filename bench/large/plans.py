"""Plans that recipe strings do not say."""

from weft import Plan, recompute
from weft.plan import dp, zero


def selective_op(plan: Plan) -> Plan:
    """FSDP with torchtitan's selective checkpoints of operators: every second product of a layer is run again, and all
    that is no product or attention. (torchtitan does not keep what norms make; here their readers do.)"""
    plan = zero(dp(plan, plan.devices), 3)
    for layer in range(32):
        here = f"layers.{layer}"
        rotated = plan.match(f"{here}.attention", op=ROTATION)
        plan = plan.trans(f"{here}.attention_norm", recompute())
        plan = plan.trans(rotated | plan.match(f"{here}.attention.wk"), recompute())
        plan = plan.trans(f"{here}.attention.wo | {here}/add | {here}.ffn_norm", recompute())
        plan = plan.trans(f"{here}/silu | {here}.w3 | {here}/mul", recompute())
    return plan


ROTATION = ("to", "view_as_complex", "unsqueeze", "mul", "view_as_real", "type_as", "repeat_interleave")


def selective_layer(plan: Plan) -> Plan:
    """FSDP with every second layer run again."""
    plan = zero(dp(plan, plan.devices), 3)
    for layer in range(0, 32, 2):
        plan = plan.trans(f"layers.{layer}.**", recompute())
    return plan

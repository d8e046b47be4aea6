"""Pipelines as a recipe: stages on devices of their own, a batch in micro-batches, an order of events.

In: a Plan that says how each stage is cut inside. Out: the Plan with a stage line for each stage (`virtual` times as
many where a device runs several), the number of micro-batches, and the schedule. Written with public primitives alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import PlanError
from weft.ir.graph import Op
from weft.order.names import named
from weft.plan.interlace import cut_vocabulary
from weft.plan.plan import Plan
from weft.plan.recycling import recycled_stages
from weft.plan.stages import balanced, begun_at


def pp(
    plan: Plan,
    stages: int,
    *,
    microbatches: int,
    schedule: str = "1f1b",
    virtual: int = 1,
    begins: Sequence[str] = (),
) -> Plan:
    """Cut a model into stages that micro-batches run through.

    Args:
        stages: how many sets of devices there are.
        virtual: stages on each set; 1 means as many as the schedule needs.
        begins: modules at which the stages after the first begin; balanced by weight if not given.
    """
    wanted = named(schedule).stages
    turns = 2 if wanted == "vee" else virtual if virtual > 1 else wanted if isinstance(wanted, int) else 1
    count = stages * turns
    if begins and len(begins) != count - 1:
        raise PlanError(
            f"{len(begins)} modules begin stages after the first, but {count} stages have {count - 1} such",
            remedy=f"name {count - 1} modules: stages=a+b+...",
        )
    if wanted in ("shared", "passes") and virtual > 1:
        raise PlanError(f"{schedule} has one stage on each set of devices", remedy="leave out virtual=")
    everywhere: frozenset[str] = frozenset()
    if wanted == "shared":
        plan, everywhere = cut_vocabulary(plan, stages)
    size = plan.devices // stages
    if wanted == "passes":
        for one in recycled_stages(plan, stages, begins):
            plan = _stage(plan, one.name, one.ops, one.place, size)
        return plan.cut_batch(microbatches).order(schedule)
    if begins:
        parts = begun_at(plan.graph, plan.rules, begins, without=everywhere)
    else:
        parts = balanced(plan.graph, plan.rules, count, without=everywhere)
    for number, ops in enumerate(parts):
        turn, place = divmod(number, stages)
        # a V: the second half of the stages runs back over the devices
        home = stages - 1 - place if wanted == "vee" and turn % 2 else place
        plan = _stage(plan, str(number), ops, home, size)
    return plan.cut_batch(microbatches).order(schedule)


def _stage(plan: Plan, name: str, ops: Sequence[Op], home: int, size: int) -> Plan:
    return plan.stage(name, [op.name for op in ops], range(home * size, (home + 1) * size))

"""Pipelines as a recipe: stages on devices of their own, a batch in micro-batches, an order of events.

In: a Plan that says how each stage is cut inside. Out: the Plan with a stage line for each stage (`virtual` times as
many where a device runs several), the number of micro-batches, and the schedule. Written with public primitives alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import PlanError
from weft.order.names import NAMES
from weft.plan.plan import Plan
from weft.plan.stages import balanced, begun_at

LOOPS = {"interleaved": 2}
"""Stages that a device runs by default under these schedules."""


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
    if schedule not in NAMES:
        raise PlanError(f"no schedule is called {schedule!r}", remedy=f"schedules: {', '.join(NAMES)}")
    turns = 2 if schedule == "zb-v" else virtual if virtual > 1 else LOOPS.get(schedule, 1)
    count = stages * turns
    if begins and len(begins) != count - 1:
        raise PlanError(
            f"{len(begins)} modules begin stages after the first, but {count} stages have {count - 1} such",
            remedy=f"name {count - 1} modules: stages=a+b+...",
        )
    parts = begun_at(plan.graph, plan.rules, begins) if begins else balanced(plan.graph, plan.rules, count)
    size = plan.devices // stages
    for number, ops in enumerate(parts):
        turn, place = divmod(number, stages)
        # a V: the second half of the stages runs back over the devices
        home = stages - 1 - place if schedule == "zb-v" and turn % 2 else place
        plan = plan.stage(str(number), [op.name for op in ops], range(home * size, (home + 1) * size))
    return plan.cut_batch(microbatches).order(schedule)

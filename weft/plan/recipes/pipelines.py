"""Pipelines as a recipe: stages on devices of their own, a batch in micro-batches, an order of events.

In: a Plan that says how each stage is cut inside. Out: the Plan with a stage line for each stage (`virtual` times as
many where a device runs several), the number of micro-batches, and the schedule. Written with public primitives alone.

Blocks that live on all devices of a pipeline are an embedding and a head with its loss, cut along the vocabulary. They
are found by structure, as `megatron.py` does: the classes of a loss, the head that makes them, tables of as many rows.
An op without a stage is laid out over all devices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weft.errors import PlanError
from weft.ir.graph import Op
from weft.order.names import named
from weft.plan.plan import Plan
from weft.plan.recipes.basic import cut_all
from weft.plan.recipes.megatron import LOSSES, vocabulary_cuts
from weft.plan.recipes.recycling import recycled_stages
from weft.plan.recipes.stages import stages_of


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
        plan, everywhere = _cut_vocabulary(plan, stages)
    size = plan.devices // stages
    if wanted == "passes":
        for one in recycled_stages(plan, stages, begins):
            plan = _stage(plan, one.name, one.ops, one.place, size)
        return plan.cut_batch(microbatches).order(schedule)
    for number, ops in enumerate(stages_of(plan.graph, plan.rules, count, begins, without=everywhere)):
        turn, place = divmod(number, stages)
        # a V: the second half of the stages runs back over the devices
        home = stages - 1 - place if wanted == "vee" and turn % 2 else place
        plan = _stage(plan, str(number), ops, home, size)
    return plan.cut_batch(microbatches).order(schedule)


def _stage(plan: Plan, name: str, ops: Sequence[Op], home: int, size: int) -> Plan:
    return plan.stage(name, [op.name for op in ops], range(home * size, (home + 1) * size))


def _cut_vocabulary(plan: Plan, stages: int) -> tuple[Plan, frozenset[str]]:
    """Cut embedding, head and loss over the stages; and the ops that live on all devices."""
    cuts = vocabulary_cuts(plan, stages, axis="all")
    if not cuts:
        raise PlanError(
            f"interlaced weaves a vocabulary that all devices share into the stages, but {plan.graph.name} has no "
            f"classes of a loss that can be cut into {stages} parts",
            remedy="use schedule=1f1b, or place ops on all devices with a plan function",
        )
    return cut_all(plan, cuts), frozenset(cuts) | _made_of_losses(plan, cuts)


def _made_of_losses(plan: Plan, cuts: Collection[str]) -> frozenset[str]:
    """Ops that read a loss which is cut, directly or not: the sum of several losses, a scale."""
    made = {name for op in plan.graph.ops if op.name in cuts and op.kind in LOSSES for name in op.outputs}
    found = set()
    for op in plan.graph.ops:
        if made & set(op.inputs):
            found.add(op.name)
            made.update(op.outputs)
    return frozenset(found)

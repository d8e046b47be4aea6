"""Blocks that live on all devices of a pipeline: an embedding and a head with its loss, cut along the vocabulary.

In: a Plan and a number of stages. Out: the Plan with those ops cut over the stages, and the names of all ops that
belong to no stage: they, and what is made of the loss. Found by structure, as `megatron.py` does: the classes of a
loss, the head that makes them, tables of as many rows. An op without a stage is laid out over all devices.
"""

from __future__ import annotations

from collections.abc import Collection

from weft.errors import PlanError
from weft.plan.megatron import LOSSES, vocabulary_cuts
from weft.plan.plan import Plan
from weft.plan.writing import cut_all

AXIS = "all"


def cut_vocabulary(plan: Plan, stages: int) -> tuple[Plan, frozenset[str]]:
    """Cut embedding, head and loss over the stages; and the ops that live on all devices."""
    cuts = vocabulary_cuts(plan, stages, axis=AXIS)
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

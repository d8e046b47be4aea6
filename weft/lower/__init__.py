"""Plan -> Program: cut ops, bring operands where they are needed, synchronise parameters.

In: a Plan. Out: a Program that lists what every device runs, forward and backward. The passes are named below in the
order they run; `check` proves the result, `collectives` counts what travels.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.cost.links import Links
from weft.errors import PlanError
from weft.ir.layout import Layout, copied_on
from weft.ir.program import Program
from weft.lower.build import Need
from weft.lower.collectives import collectives
from weft.lower.idle import without_idle_gradients
from weft.lower.piece import Lowering, Needs
from weft.plan.follow import resolve
from weft.plan.plan import Plan

__all__ = ["collectives", "lower"]


def lower(
    plan: Plan, *, links: Links | None = None, outputs: str = "loss", stored: Mapping[str, Layout] | None = None
) -> Program:
    """Turn a plan into a Program.

    Args:
        plan: the decisions.
        links: what communication costs; gloo's defaults if not given.
        outputs: "loss" returns the loss alone, "all" every output of the model, whole, on every device; backward starts
            from the loss. "open" returns every output too, and backward starts from gradients that the caller gives.
        stored: where parameters lie; as the plan has it if not given.
    """
    if plan.stages or plan.microbatches > 1:
        raise PlanError(
            "the plan runs a step in micro-batches, piece by piece, and this asks for one program of the whole batch",
            remedy="leave out pp and microbatches here; weft verify takes them",
        )
    graph = without_idle_gradients(plan.graph, outputs)
    layouts, lowering = resolve(plan, plan.rules), Lowering.of(plan, links)
    return lowering.program(
        graph,
        layouts,
        plan.devices,
        {**lowering.store(plan.graph, layouts, plan.devices), **(stored or {})},
        entering=[one.tensor for one in graph.inputs if graph.tensors[one.tensor].needs_grad],
        returned=lambda builder: _returned(plan, outputs),
        roots=outputs == "open",
    )


def stored_parameters(plan: Plan, *, links: Links | None = None) -> dict[str, Layout]:
    """Where a plan stores parameters, for a program of another form on the same weights."""
    found = Lowering.of(plan, links).store(plan.graph, resolve(plan, plan.rules), plan.devices)
    return {name: layout for name, layout in found.items() if name in plan.graph.parameter_tensors}


def _returned(plan: Plan, outputs: str) -> Needs:
    """Outputs full on every device. A gradient that comes from the caller is the same there."""
    tensors, every = plan.graph.tensors, tuple(range(plan.devices))
    found: dict[str, Need] = {}
    for name in [plan.graph.loss] if outputs == "loss" else plan.graph.outputs:
        if name is not None:
            full = copied_on(tensors[name].sizes, every)
            found[name] = Need(full, full if outputs == "open" and tensors[name].needs_grad else None)
    return found

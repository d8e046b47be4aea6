"""Idle gradients: what backward never reaches has none.

In: a Graph, and what backward starts from. Out: the Graph in which such tensors need no gradient.
"""

from __future__ import annotations

from dataclasses import replace

from weft.ir.graph import Graph


def without_idle_gradients(graph: Graph, outputs: str) -> Graph:
    """The graph with no gradient for what backward never reaches: eager leaves it without one, and so must we.

    A parameter whose every use ends in a detached tensor, or in an output other than the loss, has no gradient: an
    optimizer passes it over, which is not what it does with zeros.
    """
    reached = {name for name in ([graph.loss] if outputs == "loss" else graph.outputs) if name is not None}
    for op in reversed(graph.ops):
        if op.grad and any(name in reached and graph.tensors[name].needs_grad for name in op.outputs):
            reached.update(op.inputs)
    kept = reached | {one.tensor for one in graph.inputs}
    idle = [one for one in graph.tensors.values() if one.needs_grad and one.name not in kept]
    if not idle:
        return graph
    return replace(graph, tensors={**graph.tensors, **{one.name: replace(one, needs_grad=False) for one in idle}})

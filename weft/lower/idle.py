"""Idle gradients: what backward never reaches has none.

In: a Graph, and what backward starts from. Out: the Graph in which such tensors need no gradient; what backward reaches
from some of the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from weft.ir.graph import Graph


def without_idle_gradients(graph: Graph, outputs: str) -> Graph:
    """The graph with no gradient for what backward never reaches: eager leaves it without one, and so must we.

    A parameter whose every use ends in a detached tensor, or in an output other than the loss, has no gradient: an
    optimizer passes it over, which is not what it does with zeros.
    """
    starts = [graph.loss] if outputs == "loss" else graph.outputs
    kept = reached_from(graph, (name for name in starts if name is not None)) | {one.tensor for one in graph.inputs}
    idle = [one for one in graph.tensors.values() if one.needs_grad and one.name not in kept]
    if not idle:
        return graph
    return replace(graph, tensors={**graph.tensors, **{one.name: replace(one, needs_grad=False) for one in idle}})


def reached_from(graph: Graph, starts: Iterable[str]) -> set[str]:
    """The tensors that backward comes to from these."""
    reached = set(starts)
    for op in reversed(graph.ops):
        if op.grad and any(name in reached and graph.tensors[name].needs_grad for name in op.outputs):
            reached.update(op.inputs)
    return reached


def reached_from_some(graph: Graph, outputs: Sequence[str], names: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    """Of these tensors, those that backward comes to from some of the outputs and not from all that have a gradient:
    from which, by position. A loop that uses other outputs leaves them without a gradient."""
    live = [at for at, name in enumerate(outputs) if graph.tensors[name].needs_grad]
    if len(live) < 2:
        return {}
    reached = {at: reached_from(graph, [outputs[at]]) for at in live}
    found = {name: tuple(at for at in live if name in reached[at]) for name in names}
    return {name: places for name, places in found.items() if 0 < len(places) < len(live)}

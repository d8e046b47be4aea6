"""Light ops: what is cheaper to make again than to send.

In: a Graph and its rules. Out: the names of ops that need no weight, no gradient and hardly any work (positions,
masks): every piece of a pipeline that reads them makes them for itself.
"""

from __future__ import annotations

import math

from weft.ir.graph import Graph, Op
from weft.ops.book import RuleBook
from weft.ops.work import work_of

LIGHT = 16
"""Operations per element of its results up to which an op is made again rather than sent."""


def light_ops(graph: Graph, book: RuleBook) -> frozenset[str]:
    """Names of ops that every piece may make for itself: no weight, no gradient, no draw, hardly any work."""
    changed = {buffer.tensor for buffer in graph.buffers if buffer.update is not None}
    kept = {name for name in graph.outputs if name is not None} | {buffer.update for buffer in graph.buffers}
    light: set[str] = set()
    made: set[str] = set()
    for op in graph.ops:
        readable = all(
            name in made
            or (name not in graph.producers and name not in graph.parameter_tensors and name not in changed)
            for name in op.inputs
        )
        plain = op.draw is None and not any(graph.tensors[out].needs_grad or out in kept for out in op.outputs)
        if readable and plain and _is_light(op, graph, book):
            light.add(op.name)
            made.update(op.outputs)
    return frozenset(light)


def _is_light(op: Op, graph: Graph, book: RuleBook) -> bool:
    elements = sum(math.prod(graph.tensors[name].sizes) for name in op.outputs)
    return work_of(op, book.rule(op), graph).flops <= LIGHT * max(1, elements)

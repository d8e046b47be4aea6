"""Spans: how long the phases of a piece take, estimated from its operations and bytes.

In: a Program and its rules. Out: a Span in floating-point operations of one device (bytes count as those that take as
long): forward; backward without weight gradients, which is as long as the forward for an op that has weights and twice
as long for others, and longer by all that is run again; weight gradients, as long as the forward. Communication is not
counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from weft.ir.graph import Graph, Op
from weft.ir.oplayout import Cut, OpLayout
from weft.ir.program import Chunks, Compute, Program, Recompute, Step
from weft.lower.pipeline import Pipelined
from weft.ops.book import RuleBook
from weft.ops.work import work_of
from weft.order import Span


def spans_of(pipelined: Pipelined) -> dict[str, Span]:
    """A Span for each piece, by name."""
    return {part.piece.segment.name: span_of(part.program) for part in pipelined.parts}


def span_of(program: Program) -> Span:
    """The Span of one Program."""
    graph, book = program.graph, RuleBook(program.graph)
    f = b = w = 0.0
    for step, again in _computes(program.steps):
        op = graph.by_name[step.op]
        time = work_of(op, book.rule(op), graph).time * _share(step.layout)
        f += time
        if any(graph.tensors[name].needs_grad for name in op.outputs):
            weighty = _has_weights(graph, op)
            b += time * (1 if weighty else 2) + time * again
            w += time * weighty
    return Span(f, b, w)


def _computes(steps: Sequence[Step], again: bool = False) -> Iterator[tuple[Compute, bool]]:
    """Every computation, and whether it is run again in backward."""
    for step in steps:
        if isinstance(step, Compute):
            yield step, again
        elif isinstance(step, Chunks):
            yield from _computes(step.body, again or step.recompute)
        elif isinstance(step, Recompute):
            yield from _computes(step.body, True)


def _share(layout: OpLayout) -> float:
    """What part of an op a device does: all of its cells."""
    devices, axes = layout.grid.devices, zip(layout.grid.axes, layout.uses, strict=True)
    parts = math.prod(axis.size for axis, use in axes if isinstance(use, Cut))
    return len(devices) / len(set(devices)) / parts


def _has_weights(graph: Graph, op: Op) -> bool:
    return any(name in graph.parameter_tensors and graph.parameter_tensors[name].trainable for name in op.inputs)

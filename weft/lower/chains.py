"""Chains: which ops run chunk by chunk together, and the order that lets them.

In: the graph's ops in order, their layouts. Out: items in execution order, each a single op or a Chain: ops on one
grid whose devices repeat, where every value passed on inside stays as it lies. An op that depends on a chain but is
not part of it comes after the chain, any other op that stands between comes before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.cost.reshard import same_parts
from weft.ir.graph import Graph, Op
from weft.ir.merge import Merge, merge
from weft.ir.oplayout import OpLayout
from weft.ops.book import RuleBook


@dataclass(frozen=True)
class Chain:
    """Ops that run chunk by chunk, and how the chunks of a device fall together."""

    ops: tuple[Op, ...]
    merge: Merge


@dataclass
class _Open:
    """A chain being built, the ops held back until it closes, and the tensors that come after its start."""

    members: list[Op]
    merge: Merge
    after: list[Op]
    inside: set[str]
    late: set[str]


def chains(graph: Graph, layouts: Mapping[str, OpLayout], book: RuleBook) -> list[Op | Chain]:
    """The ops in execution order, those that run chunk by chunk gathered."""
    items: list[Op | Chain] = []
    current: _Open | None = None
    for op in graph.ops:
        merged = chunked(op, layouts[op.name], book)
        if current is not None and merged is not None and _joins(op, current, layouts, book, graph):
            current.members.append(op)
            current.inside.update(op.outputs)
            continue
        if current is not None and merged is None and not (current.inside | current.late) & set(op.inputs):
            items.append(op)
            continue
        if merged is None:
            if current is None:
                items.append(op)
            else:
                current.after.append(op)
                current.late.update(op.outputs)
            continue
        items.extend(_close(current))
        current = _Open([op], merged, [], set(op.outputs), set())
    items.extend(_close(current))
    return items


def _close(current: _Open | None) -> list[Op | Chain]:
    if current is None:
        return []
    return [Chain(tuple(current.members), current.merge), *current.after]


def chunked(op: Op, layout: OpLayout, book: RuleBook) -> Merge | None:
    """How the op's chunks fall together; None if it has none, or if they cannot be run as a loop."""
    if not layout.grid.repeats:
        return None
    merged = merge(layout.grid)
    if merged is None:
        return None
    for output in book.operands(op, layout).outputs:
        kinds = {output.layout.roles[axis].kind for axis in merged.shrunk}
        # a loop either adds up what its chunks give or places it side by side, not both
        if kinds not in ({"split"}, {"partial"}):
            return None
    return merged


def _joins(op: Op, current: _Open, layouts: Mapping[str, OpLayout], book: RuleBook, graph: Graph) -> bool:
    """True if the op can run inside the loop: same grid, nothing from after the chain, values inside as they lie."""
    first = layouts[current.members[0].name]
    layout = layouts[op.name]
    if layout.grid != first.grid or (layout.recompute is None) != (first.recompute is None):
        return False
    if current.late & set(op.inputs):
        return False
    needs = book.operands(op, layout).inputs
    for name, need in zip(op.inputs, needs, strict=True):
        if name not in current.inside:
            continue
        producer = graph.producers[name]
        made = book.operands(producer, layouts[producer.name]).outputs[producer.outputs.index(name)]
        if not same_parts(made.layout, need.layout) or not same_parts(need.grad, made.grad):
            return False
    return True

"""What cutting a color would save and cost: multiplications divided, bytes moved.

In: a set of ops, each with the name it would be cut along. Out: floating-point operations that are divided, and bytes
that reshards would move forward and backward by the table of the layout algebra, all other ops being copied:

    from a split value to a copy    the tensor once           from addends to a copy    twice
    from addends to a split value   once                      anything else             nothing

A trained parameter that a cut op needs whole has a gradient of addends, to be summed after backward: twice. An
algorithm that sums its result counts like addends. These are estimates to rank colors with, not times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from weft.ir.graph import Graph
from weft.ir.layout import COPY, PARTIAL, Role
from weft.ops.book import RuleBook
from weft.ops.derive import cut_roles
from weft.ops.rule import Rule
from weft.ops.work import contraction

Roles = tuple[Role, Role]
"""Of a value and of its gradient."""

WHOLE: Roles = (COPY, COPY)


@dataclass(frozen=True)
class Weight:
    """What a cut divides and what it moves."""

    flops: int
    bytes: int

    @property
    def bytes_per_flop(self) -> float:
        return self.bytes / self.flops if self.flops else math.inf


def weigh(graph: Graph, rules: RuleBook, cut: Mapping[str, str]) -> Weight:
    """The weight of cutting each of these ops along its name."""
    ops = [graph.by_name[op] for op in cut]
    flops = sum(contraction(op, rules.rule(op), graph) for op in ops)
    tensors = dict.fromkeys(t for op in ops for t in (*op.inputs, *op.outputs))
    return Weight(flops, sum(moved(graph, rules, cut, tensor) for tensor in tensors))


def moved(graph: Graph, rules: RuleBook, cut: Mapping[str, str], name: str) -> int:
    """Bytes that reshards of one tensor move."""
    tensor, producer = graph.tensors[name], graph.producers.get(name)
    size = tensor.num_bytes
    consumers = {
        _input_roles(rules.rule(op), cut.get(op.name), position)
        for op in graph.consumers[name]
        for position, operand in enumerate(op.inputs)
        if operand == name
    }
    if producer is None:
        parameter = graph.parameter_tensors.get(name)
        summed = parameter is not None and parameter.trainable and any(grad == PARTIAL for _, grad in consumers)
        return 2 * size if summed else 0
    if name in graph.outputs:
        consumers.add(WHOLE)
    rule, along = rules.rule(producer), cut.get(producer.name)
    made = WHOLE if along is None else cut_roles(rule, along, rule.outputs[producer.outputs.index(name)], None)
    moved = 0
    for value, gradient in consumers:
        moved += size * _times(made[0], value)
        if tensor.needs_grad:
            moved += size * _times(gradient, made[1])
    return moved + _talk(rule, along, made, size) if name == producer.outputs[0] else moved


def _times(source: Role, target: Role) -> int:
    """How often a tensor crosses the links on the way from one role to another."""
    if source in (target, COPY):
        return 0
    return 2 if (source, target) == (PARTIAL, COPY) else 1


def _input_roles(rule: Rule, name: str | None, position: int) -> Roles:
    if name is None:
        return WHOLE
    roles = cut_roles(rule, name, rule.inputs[position], position)
    # an added operand goes into one cell: no sum in backward
    return WHOLE if roles[0] == PARTIAL else roles


def _talk(rule: Rule, name: str | None, made: Roles, size: int) -> int:
    """Bytes that an algorithm moves inside the op: what it says, or those of a result that it completes, twice."""
    exchange = None if name is None else rule.algorithms.get(name)
    if exchange is None:
        return 0
    if exchange.bytes is not None:
        return exchange.bytes
    return 2 * size if made[0] == COPY and exchange.forward else 0

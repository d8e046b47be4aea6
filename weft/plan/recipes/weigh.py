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

from weft.ir.graph import Graph, Op
from weft.ops.book import RuleBook
from weft.ops.rule import Dims, Rule
from weft.ops.work import contraction

Roles = tuple[str, str]
"""Of a value and of its gradient; a split is written with its dim."""

WHOLE: Roles = ("copy", "copy")


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
        role for op in graph.consumers[name] for role in _operand_roles(rules.rule(op), cut.get(op.name), op, name)
    }
    if producer is None:
        parameter = graph.parameter_tensors.get(name)
        summed = parameter is not None and parameter.trainable and any(grad == "partial" for _, grad in consumers)
        return 2 * size if summed else 0
    if name in graph.outputs:
        consumers.add(WHOLE)
    made = _output_roles(rules.rule(producer), cut.get(producer.name), producer.outputs.index(name))
    moved = 0
    for value, gradient in consumers:
        moved += size * _times(made[0], value)
        if tensor.needs_grad:
            moved += size * _times(gradient, made[1])
    if name != producer.outputs[0]:
        return moved
    return moved + _talk(rules.rule(producer), cut.get(producer.name), made, size)


def _times(source: str, target: str) -> int:
    """How often a tensor crosses the links on the way from one role to another."""
    if source in (target, "copy"):
        return 0
    return 2 if (source, target) == ("partial", "copy") else 1


def _operand_roles(rule: Rule, name: str | None, op: Op, tensor: str) -> set[Roles]:
    if name is None:
        return {WHOLE}
    return {_input_roles(rule, name, position) for position, operand in enumerate(op.inputs) if operand == tensor}


def _input_roles(rule: Rule, name: str, position: int) -> Roles:
    split = _split(rule.inputs[position], name)
    if split is not None:
        return split
    if name in rule.algorithms:
        return "copy", rule.algorithms[name].gradient
    # an added operand goes into one cell: no sum in backward
    return WHOLE if name in rule.summed and position in rule.added else ("copy", "partial")


def _output_roles(rule: Rule, name: str | None, position: int) -> Roles:
    if name is None:
        return WHOLE
    split = _split(rule.outputs[position], name)
    if split is not None:
        return split
    if name in rule.algorithms:
        return rule.algorithms[name].output, "copy"
    return "partial", "copy"


def _split(dims: Dims, name: str) -> Roles | None:
    for position, one in enumerate(dims):
        if name in one.names:
            return f"split{position}", f"split{position}"
    return None


def _talk(rule: Rule, name: str | None, made: Roles, size: int) -> int:
    """Bytes that an algorithm moves inside the op: what it says, or those of a result that it completes, twice."""
    exchange = None if name is None else rule.algorithms.get(name)
    if exchange is None:
        return 0
    if exchange.bytes is not None:
        return exchange.bytes
    return 2 * size if made[0] == "copy" and exchange.forward else 0

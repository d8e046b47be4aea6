"""Work: what an op costs at least, whoever runs it.

In: an op, its rule, its graph. Out: floating-point operations and bytes read and written by one forward on one device.
Contractions, convolutions and attention are counted exactly. Every other op that computes counts one operation an
element, also one that nobody has a rule for: then it is a lower bound. A view costs nothing, a copy its bytes.
Light ops (positions, masks) are cheaper to make again than to send: every piece of a pipeline makes them for itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.ir.graph import Graph, Op, Tensor
from weft.ops.arguments import overload
from weft.ops.book import RuleBook
from weft.ops.rule import Rule, floating

LOOKUPS = ("embedding", "index", "gather", "index_select", "select", "slice", "narrow")
"""They read as much as they give, however large the table is."""
TRAFFIC = 4.0
"""Floating-point operations that take as long as a byte of memory traffic."""
ATTENTION = "scaled_dot_product_attention"
LIGHT = 16
"""Operations per element of its results up to which an op is made again rather than sent."""
RECURRENT = frozenset(f"{name}{kind}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for kind in ("", "_cell"))


@dataclass(frozen=True)
class Work:
    """Of one op, or of several."""

    flops: int = 0
    bytes: int = 0

    @property
    def time(self) -> float:
        """As floating-point operations that take as long."""
        return self.flops + TRAFFIC * self.bytes

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def work_of(op: Op, rule: Rule, graph: Graph) -> Work:
    """What one forward of an op costs."""
    reads = [graph.tensors[name] for name in op.inputs]
    makes = [graph.tensors[name] for name in op.outputs]
    if is_alias(op, graph):
        return Work()
    if op.kind in LOOKUPS:
        given = sum(map(_bytes, makes))
        return Work(0, 2 * given + sum(_bytes(one) for one in reads if not one.dtype.is_floating_point))
    if op.kind == "embedding_bag":
        # a row for each id, and one operation an element of it
        looked_up = _elements(reads[1]) * makes[0].sizes[-1]
        rest = sum(map(_bytes, (*reads[1:], *makes)))
        return Work(looked_up, looked_up * makes[0].dtype.itemsize + rest)
    moved = sum(map(_bytes, dict.fromkeys(reads))) + sum(map(_bytes, makes))
    return Work(0 if rule.source == "view" else _flops(op, rule, reads, makes), moved)


def is_alias(op: Op, graph: Graph) -> bool:
    """True if the outputs lie in the memory of an input: a view, or a conversion to what is there already."""
    operator = overload(op.target)
    if operator is None or not op.inputs:
        return False
    shared = all(one.alias_info is not None for one in operator._schema.returns)
    return shared and all(graph.tensors[name].dtype == graph.tensors[op.inputs[0]].dtype for name in op.outputs)


def _flops(op: Op, rule: Rule, reads: list[Tensor], makes: list[Tensor]) -> int:
    if not any(map(floating, (*reads, *makes))):
        return 0
    if op.kind == ATTENTION:
        query, key, value = (one.sizes for one in reads[:3])
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if _is_convolution(op):
        return _convolution(op, reads, makes)
    if op.kind in RECURRENT:
        # every matrix multiplies each row of each step once
        weights = [one for one in reads if len(one.sizes) == 2 and "b" not in _named(rule, reads.index(one))]
        return 2 * math.prod(reads[0].sizes[:-1]) * sum(map(_elements, weights))
    largest = max(map(_elements, (*reads, *makes)), default=0)
    return multiplications(rule) or (largest if reads else 0)


def contraction(op: Op, rule: Rule, graph: Graph) -> int:
    """Floating-point operations of an op that multiplies and sums (a product of matrices, a convolution); else 0."""
    if not _is_convolution(op):
        return multiplications(rule)
    return _convolution(op, [graph.tensors[name] for name in op.inputs], [graph.tensors[name] for name in op.outputs])


def _is_convolution(op: Op) -> bool:
    return op.kind.startswith("conv") and len(op.inputs) > 1


def _convolution(op: Op, reads: list[Tensor], makes: list[Tensor]) -> int:
    if op.kind == "conv_tbc":
        return 2 * _elements(makes[0]) * math.prod(reads[1].sizes[:2])
    filtered = reads[0] if "transpose" in op.kind else makes[0]
    return 2 * _elements(filtered) * math.prod(reads[1].sizes[1:])


def _named(rule: Rule, position: int) -> frozenset[str]:
    return frozenset(name for one in rule.inputs[position] for name in one.names)


def multiplications(rule: Rule) -> int:
    """Floating-point operations of a contraction; 0 for an op that touches each element once.

    The index space is that of the names which two operands share; an op whose index space is no larger than its
    largest operand does not contract, unless it is a product with a single row (a batch of one).
    """
    operands = (*rule.inputs, *rule.outputs)
    held = [frozenset(name for one in dims for name in one.names) for dims in operands]
    shared = [name for name in rule.names if sum(name in names for names in held) > 1]
    volume = math.prod(rule.sizes[name] for name in shared)
    largest = max((math.prod(rule.sizes[name] for name in names) for names in held), default=0)
    return 2 * volume if volume > largest or _is_product(rule) else 0


def _is_product(rule: Rule) -> bool:
    """True for a matrix times a vector: a summed name of two inputs, an output's name that one of them lacks."""
    held = [frozenset(name for one in dims for name in one.names) for dims in rule.inputs]
    made = frozenset(name for dims in rule.outputs for one in dims for name in one.names)
    for summed in rule.summed:
        factors = [names for i, names in enumerate(held) if summed in names and i not in rule.added]
        if len(factors) > 1 and made & (frozenset.union(*factors) - frozenset.intersection(*factors)):
            return True
    return False


def _elements(tensor: Tensor) -> int:
    return math.prod(tensor.sizes)


def _bytes(tensor: Tensor) -> int:
    return _elements(tensor) * tensor.dtype.itemsize


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

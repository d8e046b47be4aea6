"""Work: what an op costs at least, whoever runs it.

In: an op, its rule, its graph. Out: floating-point operations and bytes read and written by one forward on one device.
Contractions, convolutions and attention are counted exactly. Every other op that computes counts one operation an
element, also one that nobody has a rule for: then it is a lower bound. A view costs nothing, a copy its bytes.
Light ops (positions, masks) are cheaper to make again than to send: every piece of a pipeline makes them for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from weft.ir.graph import Graph, Op, Tensor
from weft.ops.arguments import overload
from weft.ops.book import RuleBook
from weft.ops.build import OpView
from weft.ops.rule import Rule, floating, names_of

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
    it = OpView.of(op, graph)
    reads, makes = it.reads, it.makes
    if is_alias(op, graph):
        return Work()
    if op.kind in LOOKUPS:
        return Work(0, _bytes((*makes, *makes, *(one for one in reads if not one.dtype.is_floating_point))))
    if op.kind == "embedding_bag":
        # a row for each id, and one operation an element of it
        looked_up = _elements(reads[1]) * it.result[-1]
        return Work(looked_up, looked_up * makes[0].dtype.itemsize + _bytes((*reads[1:], *makes)))
    return Work(0 if rule.source == "view" else _flops(it, rule), _bytes((*dict.fromkeys(reads), *makes)))


def is_alias(op: Op, graph: Graph) -> bool:
    """True if the outputs lie in the memory of an input: a view, or a conversion to what is there already."""
    operator = overload(op.target)
    if operator is None or not op.inputs:
        return False
    shared = all(one.alias_info is not None for one in operator._schema.returns)
    return shared and all(graph.tensors[name].dtype == graph.tensors[op.inputs[0]].dtype for name in op.outputs)


def _flops(it: OpView, rule: Rule) -> int:
    reads, held = it.reads, (*it.reads, *it.makes)
    if not any(map(floating, held)):
        return 0
    if it.kind == ATTENTION:
        query, key, value = it.shapes[:3]
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if _is_convolution(it.op):
        return _convolution(it)
    if it.kind in RECURRENT:
        # every matrix multiplies each row of each step once
        pairs = zip(reads, rule.inputs, strict=True)
        weights = [one for one, dims in pairs if len(one.sizes) == 2 and "b" not in names_of(dims)]
        return 2 * math.prod(it.shape[:-1]) * sum(map(_elements, weights))
    return multiplications(rule) or (max(map(_elements, held)) if reads else 0)


def contraction(op: Op, rule: Rule, graph: Graph) -> int:
    """Floating-point operations of an op that multiplies and sums (a product of matrices, a convolution); else 0."""
    return _convolution(OpView.of(op, graph)) if _is_convolution(op) else multiplications(rule)


def _is_convolution(op: Op) -> bool:
    return op.kind.startswith("conv") and len(op.inputs) > 1


def _convolution(it: OpView) -> int:
    if it.kind == "conv_tbc":
        return 2 * math.prod(it.result) * math.prod(it.shapes[1][:2])
    filtered = it.shape if "transpose" in it.kind else it.result
    return 2 * math.prod(filtered) * math.prod(it.shapes[1][1:])


def multiplications(rule: Rule) -> int:
    """Floating-point operations of a contraction; 0 for an op that touches each element once.

    The index space is that of the names which two operands share; an op whose index space is no larger than its
    largest operand does not contract, unless it is a product with a single row (a batch of one).
    """
    held = [set(names_of(dims)) for dims in (*rule.inputs, *rule.outputs)]
    shared = [name for name in rule.names if sum(name in names for names in held) > 1]
    volume = math.prod(rule.sizes[name] for name in shared)
    largest = max((math.prod(rule.sizes[name] for name in names) for names in held), default=0)
    return 2 * volume if volume > largest or _is_product(rule) else 0


def _is_product(rule: Rule) -> bool:
    """True for a matrix times a vector: a summed name of two inputs, an output's name that one of them lacks."""
    held = [frozenset(names_of(dims)) for dims in rule.inputs]
    for summed in rule.summed:
        factors = [names for i, names in enumerate(held) if summed in names and i not in rule.added]
        if len(factors) > 1 and rule.made & (frozenset.union(*factors) - frozenset.intersection(*factors)):
            return True
    return False


def _elements(tensor: Tensor) -> int:
    return math.prod(tensor.sizes)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.num_bytes for one in tensors)


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
    elements = sum(_elements(graph.tensors[name]) for name in op.outputs)
    return work_of(op, book.rule(op), graph).flops <= LIGHT * max(1, elements)

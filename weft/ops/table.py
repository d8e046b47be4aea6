"""The rule of any op: where it is looked up.

In: an Op and its Graph. Out: its Rule. Looked up by family (the target without overload), in this order: algorithms,
random operators, views, the table, pointwise operators. An operator found nowhere may only be copied:
`copied_rule` freezes every dim of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import RuleError
from weft.ir.graph import Graph, Op, Tensor
from weft.ops.algorithms import algorithm_rules
from weft.ops.arguments import arguments, family, operand, overload
from weft.ops.creation import CREATION
from weft.ops.experts import COUNTS
from weft.ops.grammar import instantiate, parse
from weft.ops.indexing import INDEXING
from weft.ops.joins import JOINS
from weft.ops.linalg import LINALG
from weft.ops.matmul import PRODUCTS, ROWS, Row
from weft.ops.pieces import PIECES
from weft.ops.pointwise import POINTWISE_LIKE, is_pointwise, pointwise_rule
from weft.ops.random_ops import random_rules
from weft.ops.recurrent import RECURRENT
from weft.ops.reductions import REDUCTIONS
from weft.ops.rule import Rule, RuleOf, dim
from weft.ops.spectral import SPECTRAL
from weft.ops.views import VIEWS
from weft.ops.windows import WINDOWS

COPY_IT = "keep the op copied: plan.trans(op, copy(...))"


COMPUTED: Mapping[str, RuleOf] = {
    **VIEWS,
    **PIECES,
    **INDEXING,
    **COUNTS,
    **CREATION,
    **PRODUCTS,
    **REDUCTIONS,
    **WINDOWS,
    **LINALG,
    **SPECTRAL,
    **JOINS,
    **RECURRENT,
    **POINTWISE_LIKE,
}
"""The rules of this room that are computed from an op's shapes and arguments, by family."""


def rule_for(op: Op, graph: Graph) -> Rule:
    """How an op may be cut. Refused, with the user's line, if nobody has said."""
    found = _find(op)
    reads, makes = _tensors(op, graph)
    if found is None:
        raise RuleError(f"no rule says how {op.target} may be cut", place=op.place, remedy=COPY_IT)
    return found(op, reads, makes)


def has_rule(op: Op, graph: Graph) -> bool:
    """True if `rule_for` has an answer for this op, with these arguments."""
    if _find(op) is None:
        return False
    try:
        rule_for(op, graph)
    except RuleError:
        return False
    return True


def look_up(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule | None:
    """What the table says of an op; None if it says nothing."""
    found = _find(op)
    try:
        return None if found is None else found(op, reads, makes)
    except RuleError:
        return None


def copied_rule(op: Op, graph: Graph) -> Rule:
    """The rule of an operator that nobody knows: every dim has a name, and no name may be cut."""
    reads, makes = _tensors(op, graph)
    names = [
        tuple(f"{side}{position}_{i}" for i in range(len(tensor.sizes)))
        for side, tensors in (("in", reads), ("out", makes))
        for position, tensor in enumerate(tensors)
    ]
    sizes: dict[str, int] = {}
    for own, tensor in zip(names, (*reads, *makes), strict=True):
        sizes.update(zip(own, tensor.sizes, strict=True))
    dims = [tuple(map(dim, own)) for own in names]
    frozen = frozenset(sizes)
    inputs, outputs = tuple(dims[: len(reads)]), tuple(dims[len(reads) :])
    return Rule(inputs=inputs, outputs=outputs, sizes=sizes, frozen=frozen, source="none")


def _find(op: Op) -> RuleOf | None:
    name = family(op)
    for rules in (algorithm_rules(), random_rules(), COMPUTED):
        if name in rules:
            return rules[name]
    if overload(op.target) is None:
        return None
    if name in ROWS:
        return row_rule(ROWS[name])
    return pointwise_rule if is_pointwise(op) else None


def row_rule(row: Row) -> RuleOf:
    """A row of the table as a rule: its operands are the tensor arguments of the schema, in that order."""

    def rule_of(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
        operator = overload(op.target)
        assert operator is not None
        values = arguments(op)
        tensors = [a.name for a in operator._schema.arguments if "Tensor" in str(a.type)]
        positions = [operand(values[name]) for name in tensors]
        in_order = tuple(reads[i] for i in positions if i is not None)
        text = row.text if isinstance(row.text, str) else row.text(op, in_order)
        return instantiate(parse(text), reads, makes, present=positions, linear=row.linear)

    return rule_of


def _tensors(op: Op, graph: Graph) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    reads = tuple(graph.tensors[name] for name in op.inputs)
    return reads, tuple(graph.tensors[name] for name in op.outputs)

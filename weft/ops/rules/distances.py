"""Norms and distances: what happens when the dim they run along is cut.

In: an op and the tensors it reads and makes. Out: its rule. Norms of vectors, distances and cosines are complete on
every cell after one sum over the cells; norms of matrices other than Frobenius' need whole matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from weft.ir.graph import Ref
from weft.ops.arguments import call, positive
from weft.ops.build import OpView, RuleOf, broadcast, broadcasting, numbered_dims, rules_of, talking
from weft.ops.rule import Rule, names_of
from weft.ops.rules.reductions import keeps, left_dims, reduced_dims, talking_rule
from weft.runtime.operators.algorithms import Exchange


def _exchange(order: float) -> Exchange:
    # the largest element is looked for again in backward, to share the gradient among equals
    return Exchange(forward=("all_reduce",), backward=("all_reduce",) if math.isinf(order) else ())


def vector_norm(it: OpView) -> Rule:
    """`linalg_vector_norm` and the old `norm`, of any order."""
    given = it.args.get("ord", it.args.get("p"))
    return _vector_norm(it, reduced_dims(it), 2.0 if given is None else float(given))


def _vector_norm(it: OpView, reduced: Sequence[int], order: float) -> Rule:
    dtype = it.makes[0].dtype if it.args.get("dtype") is not None else None
    options = {"order": order, "dtype": dtype}
    return talking_rule(it, reduced, "weft.vector_norm", _exchange(order), lambda cell: options)


def matrix_norm(it: OpView) -> Rule:
    """`linalg_norm`, `linalg_matrix_norm`, `frobenius_norm`, `nuclear_norm`: vectors' norms where they are that."""
    order = it.args.get("ord", "nuc" if it.kind == "nuclear_norm" else "fro")
    reduced = reduced_dims(it)
    if order == "fro" or (it.kind == "linalg_norm" and order is None):
        return _vector_norm(it, reduced, 2.0)
    if it.kind == "linalg_norm" and not isinstance(order, str) and len(reduced) == 1:
        return _vector_norm(it, reduced, float(order))
    dims = numbered_dims(it.shape, whole=reduced)
    return it.rule([dims], [left_dims(it, dims, reduced)])


def _between(it: OpView, along: Sequence[int], target: str) -> Rule:
    """Two operands that broadcast, compared along dims of the common shape."""
    shape = broadcast(it.shapes)
    dims = numbered_dims(shape)
    names = names_of(dims[d] for d in along)
    options = {name: it.args[name] for name in ("p", "eps") if name in it.args}
    made = call(target, Ref("0"), Ref("1"), tuple(along), keeps(it), **options)
    # an operand that broadcasts along the dim is compared with every part: its gradients are addends
    marks = talking(names, _exchange(float(it.args.get("p", 2.0))), made)
    return it.rule(broadcasting(dims, shape, it.reads), [left_dims(it, dims, along)], **marks)


def pairwise_distance(it: OpView) -> Rule:
    """The norm of differences along the last dim."""
    return _between(it, (max(map(len, it.shapes)) - 1,), "weft.distance")


def dist(it: OpView) -> Rule:
    """The norm of all differences."""
    return _between(it, range(max(map(len, it.shapes))), "weft.distance")


def cosine_similarity(it: OpView) -> Rule:
    """The cosine of two vectors along one dim."""
    return _between(it, (positive(it.args["dim"], max(map(len, it.shapes))),), "weft.cosine")


RULES: Mapping[str, RuleOf] = {
    **rules_of(vector_norm, "linalg_vector_norm norm"),
    **rules_of(matrix_norm, "linalg_norm linalg_matrix_norm frobenius_norm nuclear_norm"),
    "aten.pairwise_distance": pairwise_distance,
    "aten.dist": dist,
    "aten.cosine_similarity": cosine_similarity,
}
"""Rules by operator."""

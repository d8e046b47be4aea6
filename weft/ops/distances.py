"""Norms and distances: what happens when the dim they run along is cut.

In: an op and the tensors it reads and makes. Out: its rule. Norms of vectors, distances and cosines are complete on
every cell after one sum over the cells; norms of matrices other than Frobenius' need whole matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.ir.graph import Op, Ref, Tensor
from weft.ops.arguments import arguments, integers, positive
from weft.ops.build import aligned, broadcast, build, fixed, numbered_dims
from weft.ops.exchange import call, names_of, told_when_cut, with_exchange
from weft.ops.rule import Call, CellView, Exchange, Group, Rule, RuleOf
from weft.ops.statistics import left_dims, reduced_dims, reduction

Reads = tuple[Tensor, ...]

_X, _Y = Ref("0"), Ref("1")


def vector_norm(op: Op, reads: Reads, makes: Reads) -> Rule:
    """`linalg_vector_norm` and the old `norm`, of any order."""
    args = arguments(op)
    given = args.get("ord", args.get("p"))
    order = 2.0 if given is None else float(given)
    reduced = reduced_dims(args.get("dim"), len(reads[0].sizes))
    return _vector_norm(args, reads, makes, reduced, order)


def _vector_norm(args: Mapping[str, Any], reads: Reads, makes: Reads, reduced: tuple[int, ...], order: float) -> Rule:
    keepdim = bool(args.get("keepdim", False))
    dtype = makes[0].dtype if args.get("dtype") is not None else None

    def told(op: Op, cell: CellView, comms: tuple[Group, ...]) -> Call:
        return call("weft.vector_norm", _X, order, reduced, keepdim, dtype=dtype, comms=comms)

    # the largest element is looked for again in backward, to share the gradient among equals
    backward = ("all_reduce",) if math.isinf(order) else ()
    return reduction(reads, makes, reduced, keepdim, Exchange(forward=("all_reduce",), backward=backward), told)


def matrix_norm(op: Op, reads: Reads, makes: Reads) -> Rule:
    """`linalg_norm`, `linalg_matrix_norm`, `frobenius_norm`, `nuclear_norm`: vectors' norms where they are that."""
    args = arguments(op)
    order = args.get("ord", "nuc" if op.kind == "nuclear_norm" else "fro")
    count = len(reads[0].sizes)
    given = integers(args.get("dim"))
    reduced = tuple(positive(d, count) for d in given)
    if op.kind == "linalg_norm" and order is None:
        return _vector_norm(args, reads, makes, reduced or tuple(range(count)), 2.0)
    if op.kind == "linalg_norm" and not isinstance(order, str) and (len(reduced) == 1 or count == 1):
        return _vector_norm(args, reads, makes, reduced or (0,), float(order))
    reduced = reduced or tuple(range(count))
    if order == "fro":
        return _vector_norm(args, reads, makes, reduced, 2.0)
    dims = tuple(
        fixed(size) if d in reduced else one
        for d, (one, size) in enumerate(zip(numbered_dims(reads[0].sizes), reads[0].sizes, strict=True))
    )
    return build([dims], [left_dims(dims, reduced, bool(args.get("keepdim", False)))], reads, makes)


def _between(op: Op, reads: Reads, makes: Reads, along: tuple[int, ...], keepdim: bool, target: str) -> Rule:
    """Two operands that broadcast, compared along dims of the common shape."""
    shape = broadcast([tensor.sizes for tensor in reads])
    dims = numbered_dims(shape)
    inputs = [aligned(dims, shape, tensor.sizes) or () for tensor in reads]
    names = names_of(tuple(dims[d] for d in along))
    args = arguments(op)
    options = {name: args[name] for name in ("p", "eps") if name in args}
    infinite = math.isinf(float(args.get("p", 2.0)))

    def told(op: Op, cell: CellView, comms: tuple[Group, ...]) -> Call:
        return call(target, _X, _Y, along, keepdim, **options, comms=comms)

    rule = build(inputs, [left_dims(dims, along, keepdim)], reads, makes, local=told_when_cut(names, told))
    backward = ("all_reduce",) if infinite else ()
    # an operand that broadcasts along the dim is compared with every part: its gradients are addends
    return with_exchange(rule, dict.fromkeys(names, Exchange(forward=("all_reduce",), backward=backward)))


def pairwise_distance(op: Op, reads: Reads, makes: Reads) -> Rule:
    """The norm of differences along the last dim."""
    last = max(len(tensor.sizes) for tensor in reads) - 1
    return _between(op, reads, makes, (last,), bool(arguments(op)["keepdim"]), "weft.distance")


def dist(op: Op, reads: Reads, makes: Reads) -> Rule:
    """The norm of all differences."""
    count = max(len(tensor.sizes) for tensor in reads)
    return _between(op, reads, makes, tuple(range(count)), False, "weft.distance")


def cosine_similarity(op: Op, reads: Reads, makes: Reads) -> Rule:
    """The cosine of two vectors along one dim."""
    count = max(len(tensor.sizes) for tensor in reads)
    return _between(op, reads, makes, (positive(arguments(op)["dim"], count),), False, "weft.cosine")


def distance_rules() -> Mapping[str, RuleOf]:
    """Rules by operator."""
    return {
        **dict.fromkeys(("aten.linalg_vector_norm", "aten.norm"), vector_norm),
        **dict.fromkeys(("aten.linalg_norm", "aten.linalg_matrix_norm", "aten.frobenius_norm"), matrix_norm),
        "aten.nuclear_norm": matrix_norm,
        "aten.pairwise_distance": pairwise_distance,
        "aten.dist": dist,
        "aten.cosine_similarity": cosine_similarity,
    }

"""Linear algebra on matrices: each matrix by itself, so the dims in front of it may be cut.

In: an op and its shapes. Out: its rule, leading dims `b0 b1 ...`. Rows and columns of a matrix that is inverted or
factored belong together; the right-hand sides of a system are columns of their own and may be cut too.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.ops.build import OpView, RuleOf, aligned, fixed_dims, named, numbered_dims, rules_of
from weft.ops.rule import Rule, dim, fixed, names_of


def matrix_rule(it: OpView) -> Rule:
    """inv, det, cholesky, svd, eigh, qr, ...: the last two dims whole; tensors of tolerances broadcast."""
    shape = it.shape[:-2]
    lead = numbered_dims(shape, "b")
    others = [aligned(lead, shape, tensor.sizes) for tensor in it.reads[1:]]
    if None in others:
        lead, others = tuple(map(fixed, shape)), list(fixed_dims(*it.reads[1:]))
    inputs = [(*lead, *map(fixed, it.shape[-2:])), *(found for found in others if found is not None)]
    return it.rule(inputs, [(*lead, *map(fixed, tensor.sizes[len(shape) :])) for tensor in it.makes])


def solve_rule(it: OpView) -> Rule:
    """linalg_solve, solve_triangular, cholesky_solve: `b* n n, b* n k -> b* n k`, or `b* k n` from the right."""
    if it.kind == "cholesky_solve":  # its schema has the right-hand sides first
        return it.text("b* _ k, b* _ _ -> b* _ k", linear=[[0]])
    columns = "_ k" if it.args.get("left", True) else "k _"
    if it.kind == "linalg_solve":
        a, b = (it.shapes[it.where(name)] for name in "AB")
        columns = "_" if len(b) == 1 or b == a[:-1] else columns  # vectors
    return it.text(f"b* _ _, b* {columns} -> b* {columns}", linear=[[1]])


def multi_dot_rule(it: OpView) -> Rule:
    """linalg_multi_dot, chain_matmul: `m k0+, k0+ k1+, k1+ n -> m n`; a vector may stand at either end."""
    names = [named("m", it.shape[0])] if len(it.shape) == 2 else []
    inner = [named(f"k{i}", shape[-1]) for i, shape in enumerate(it.shapes[:-1])]
    outer = [named("n", it.shapes[-1][1])] if len(it.shapes[-1]) == 2 else []
    chain = [*names, *inner, *outer]
    inputs, position = [], 0
    for shape in it.shapes:
        inputs.append(tuple(chain[position : position + len(shape)]))
        position += len(shape) - 1
    linear = [[i] for i in range(len(inputs))]
    return it.rule(inputs, [(*names, *outer)], summed=names_of(inner), linear=linear)


def kron_rule(it: OpView) -> Rule:
    """`m n, p q -> (m p) (n q)`: every dim of the result holds the second operand's inside the first's."""
    count = len(it.result)
    padded = [(1,) * (count - len(shape)) + shape for shape in it.shapes]
    sides = [numbered_dims(shape, prefix) for prefix, shape in zip("xy", padded, strict=True)]
    sizes = {
        name: n
        for dims, shape in zip(sides, padded, strict=True)
        for one, n in zip(dims, shape, strict=True)
        for name in one.names
    }
    joined = tuple(dim(*x.products[0], *y.products[0]) for x, y in zip(*sides, strict=True))
    inputs = [dims[count - len(shape) :] for dims, shape in zip(sides, it.shapes, strict=True)]
    return it.rule(inputs, [joined], sizes=sizes, linear=[[0], [1]])


_MATRICES = """
linalg_inv linalg_inv_ex inverse linalg_det det linalg_slogdet slogdet logdet linalg_cholesky linalg_cholesky_ex
cholesky cholesky_inverse linalg_svd svd linalg_svdvals linalg_eigh linalg_eigvalsh linalg_qr qr linalg_pinv pinverse
linalg_matrix_power matrix_power linalg_matrix_exp matrix_exp linalg_lu_factor linalg_lu linalg_cond linalg_matrix_rank
"""

RULES: Mapping[str, RuleOf] = {
    **rules_of(matrix_rule, _MATRICES),
    **rules_of(solve_rule, "linalg_solve linalg_solve_triangular cholesky_solve"),
    **rules_of(multi_dot_rule, "linalg_multi_dot chain_matmul"),
    "aten.kron": kron_rule,
}
"""Rules by operator."""

"""Linear algebra on matrices: each matrix by itself, so the dims in front of it may be cut.

In: an op and its shapes. Out: its rule, leading dims `b0 b1 ...`. Rows and columns of a matrix that is inverted or
factored belong together; the right-hand sides of a system are columns of their own and may be cut too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.ir.graph import Op, Tensor
from weft.ops.arguments import arguments, operand
from weft.ops.build import aligned, broadcast, build, fixed, named, numbered_dims
from weft.ops.rule import Dim, Dims, Rule, RuleOf


def _leading(lead: Dims, shape: Sequence[int], own: Sequence[int]) -> Dims:
    found = aligned(lead, shape, own)
    assert found is not None, f"{tuple(own)} does not broadcast to {tuple(shape)}"
    return found


def matrix_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """inv, det, cholesky, svd, eigh, qr, ...: the last two dims whole; tensors of tolerances broadcast."""
    shape = reads[0].sizes[:-2]
    lead = numbered_dims(shape, "b")
    count = len(shape)
    inputs: list[Dims] = [(*lead, *map(fixed, reads[0].sizes[-2:]))]
    for tensor in reads[1:]:
        found = aligned(lead, shape, tensor.sizes)
        inputs.append(tuple(map(fixed, tensor.sizes)) if found is None else found)
    if any(found is None for found in (aligned(lead, shape, tensor.sizes) for tensor in reads[1:])):
        inputs[0] = tuple(map(fixed, reads[0].sizes))
        lead = tuple(map(fixed, shape))
    outputs = [(*lead, *map(fixed, tensor.sizes[count:])) for tensor in makes]
    return build(inputs, outputs, reads, makes)


def solve_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """linalg_solve, solve_triangular, cholesky_solve: `b* n n, b* n k -> b* n k`, or `b* k n` from the right."""
    args = arguments(op)
    matrix, sides = ("input2", "self") if op.kind == "cholesky_solve" else ("A" if "A" in args else "self", "B")
    where, at = operand(args[matrix]), operand(args[sides])
    assert where is not None and at is not None
    a, b = reads[where].sizes, reads[at].sizes
    vector = op.kind == "linalg_solve" and (len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1]))
    shape = broadcast([a[:-2], b[:-1] if vector else b[:-2]])
    lead = numbered_dims(shape, "b")
    columns: tuple[Dim, ...] = (fixed(b[-1]),)
    if not vector:
        k = named("k", b[-1] if args.get("left", True) else b[-2])
        columns = (fixed(b[-2]), k) if args.get("left", True) else (k, fixed(b[-1]))
    own = len(b) - len(columns)
    held = {
        where: (*_leading(lead, shape, a[:-2]), *map(fixed, a[-2:])),
        at: (*_leading(lead, shape, b[:own]), *columns),
    }
    return build([held[i] for i in range(2)], [(*lead, *columns)], reads, makes, linear=[[at]])


def multi_dot_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """linalg_multi_dot, chain_matmul: `m k0+, k0+ k1+, k1+ n -> m n`; a vector may stand at either end."""
    names: list[Dim] = []
    if len(reads[0].sizes) == 2:
        names.append(named("m", reads[0].sizes[0]))
    inner = [named(f"k{i}", tensor.sizes[-1]) for i, tensor in enumerate(reads[:-1])]
    outer = [named("n", reads[-1].sizes[1])] if len(reads[-1].sizes) == 2 else []
    chain = [*names, *inner, *outer]
    inputs, position = [], 0
    for tensor in reads:
        inputs.append(tuple(chain[position : position + len(tensor.sizes)]))
        position += len(tensor.sizes) - 1
    summed = {name for one in inner for name in one.names}
    linear = [[i] for i in range(len(reads))]
    return build(inputs, [(*names, *outer)], reads, makes, summed=summed, linear=linear)


def kron_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """`m n, p q -> (m p) (n q)`: every dim of the result holds the second operand's inside the first's."""
    count = len(makes[0].sizes)
    sizes: dict[str, int] = {}
    sides: list[Dims] = []
    for prefix, tensor in zip("xy", reads, strict=True):
        padded = (1,) * (count - len(tensor.sizes)) + tensor.sizes
        dims = numbered_dims(padded, prefix)
        sizes |= {name: size for one, size in zip(dims, padded, strict=True) for name in one.names}
        sides.append(dims)
    joined = tuple(Dim(((*x.products[0], *y.products[0]),)) for x, y in zip(*sides, strict=True))
    inputs = [dims[count - len(tensor.sizes) :] for dims, tensor in zip(sides, reads, strict=True)]
    return build(inputs, [joined], reads, makes, sizes=sizes, linear=[[0], [1]])


_MATRICES = """
linalg_inv linalg_inv_ex inverse linalg_det det linalg_slogdet slogdet logdet linalg_cholesky linalg_cholesky_ex
cholesky cholesky_inverse linalg_svd svd linalg_svdvals linalg_eigh linalg_eigvalsh linalg_qr qr linalg_pinv pinverse
linalg_matrix_power matrix_power linalg_matrix_exp matrix_exp linalg_lu_factor linalg_lu linalg_cond linalg_matrix_rank
"""

LINALG: Mapping[str, RuleOf] = {
    **{f"aten.{name}": matrix_rule for name in _MATRICES.split()},
    **dict.fromkeys(("aten.linalg_solve", "aten.linalg_solve_triangular", "aten.cholesky_solve"), solve_rule),
    **dict.fromkeys(("aten.linalg_multi_dot", "aten.chain_matmul"), multi_dot_rule),
    "aten.kron": kron_rule,
}
"""Computed rules, by family."""

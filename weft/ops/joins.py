"""Stacks under other names, diagonals, quarter turns and channels dealt out anew.

In: an op and its shapes. Out: its rule. hstack and its kin give operands of few dims more of them and join them; the
joined dim is cut in the operands' common unit, as in a cat. The dims of a diagonal and of a turn may not be cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.ir.graph import Op, Tensor
from weft.ir.ranges import count
from weft.ops.arguments import arguments, call_with, integers, positive
from weft.ops.build import build, fixed, named, numbered_dims, product_dim
from weft.ops.pieces import pieces_of, replaced
from weft.ops.rule import Call, CellView, Dims, Rule, RuleOf
from weft.ops.windows import local_window


def _grown(kind: str, sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape in which an operand is joined, and the positions of the dims that it was given."""
    own = tuple(sizes)
    if kind == "hstack":
        return (own, ()) if own else ((1,), (0,))
    if kind == "column_stack":
        return {0: ((1, 1), (0, 1)), 1: ((*own, 1), (1,))}.get(len(own), (own, ()))
    if kind == "dstack":
        return {
            0: ((1, 1, 1), (0, 1, 2)),
            1: ((1, *own, 1), (0, 2)),
            2: ((*own, 1), (2,)),
        }.get(len(own), (own, ()))
    return {0: ((1, 1), (0, 1)), 1: ((1, *own), (0,))}.get(len(own), (own, ()))


def stack_by_name_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """hstack, vstack, dstack, column_stack."""
    target = numbered_dims(makes[0].sizes)
    at = {"hstack": min(1, len(target) - 1), "column_stack": 1, "dstack": 2}.get(op.kind, 0)
    grown = [_grown(op.kind, tensor.sizes) for tensor in reads]
    whole, parts, unit = pieces_of(f"d{at}", [shape[at] for shape, _ in grown])
    inputs: list[Dims] = []
    for (_, added), part in zip(grown, parts, strict=True):
        dims = replaced(target, at, part)
        inputs.append(tuple(one for i, one in enumerate(dims) if i not in added))
    sizes = {f"d{at}": unit} if unit > 1 else {}
    linear = [range(len(reads))]
    return build(inputs, [replaced(target, at, whole)], reads, makes, sizes=sizes, linear=linear, source="view")


def diag_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """diag, diagflat, trace: everything lies on one diagonal of the whole."""
    sides = [tuple(map(fixed, tensor.sizes)) for tensor in (*reads, *makes)]
    return build(sides[:1], sides[1:], reads, makes, linear=[[0]])


def diag_embed_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """The last dim becomes the diagonal of two new ones."""
    lead = numbered_dims(reads[0].sizes[:-1])
    target = _around(op, lead, makes[0].sizes)
    return build([(*lead, fixed(reads[0].sizes[-1]))], [target], reads, makes, linear=[[0]])


def diagonal_scatter_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Written to one diagonal, the last dim of what is written."""
    lead = numbered_dims(reads[1].sizes[:-1])
    target = _around(op, lead, makes[0].sizes)
    written = (*lead, fixed(reads[1].sizes[-1]))
    return build([target, written], [target], reads, makes, linear=[[0, 1]])


def _around(op: Op, lead: Dims, sizes: Sequence[int]) -> Dims:
    """Leading dims with the two of the diagonal put in their places."""
    values = arguments(op)
    pair = {positive(values[name], len(sizes)) for name in ("dim1", "dim2")}
    rest = iter(lead)
    return tuple(fixed(size) if i in pair else next(rest) for i, size in enumerate(sizes))


def turn_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """rot90: a plane is turned, all other dims may be cut."""
    moved = {positive(i, len(reads[0].sizes)) for i in integers(arguments(op)["dims"])}
    sides = [
        tuple(fixed(size) if i in moved else named(f"d{i}", size) for i, size in enumerate(tensor.sizes))
        for tensor in (reads[0], makes[0])
    ]
    return build(sides[:1], sides[1:], reads, makes, linear=[[0]], source="view")


def channel_shuffle_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """`b (g c) ... -> b (c g) ...`: channels of each group dealt out in turn; `c` may be cut, `g` too."""
    shape = reads[0].sizes
    groups = int(arguments(op)["groups"])
    sizes = {"g": groups, "c": shape[1] // groups}
    rest = numbered_dims(shape[2:], "s")
    lead = (named("b", shape[0]),)
    source = (*lead, product_dim("g", "c", sizes=sizes), *rest)
    target = (*lead, product_dim("c", "g", sizes=sizes), *rest)
    return build([source], [target], reads, makes, sizes=sizes, linear=[[0]], local=_local_shuffle, source="view")


def _local_shuffle(op: Op, cell: CellView) -> Call:
    # parts of `g` and `c` keep the order of the whole, so a part is shuffled like a whole of as many groups
    local_window(op, cell)
    return call_with(op, {"groups": count(cell.names["g"])} if "g" in cell.names else {})


def block_diag_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """block_diag, cartesian_prod: no two operands share a dim of the result, so none may be cut."""
    sides = [tuple(map(fixed, tensor.sizes)) for tensor in (*reads, *makes)]
    linear = [range(len(reads))]
    return build(sides[: len(reads)], sides[len(reads) :], reads, makes, linear=linear)


JOINS: Mapping[str, RuleOf] = {
    **{f"aten.{name}": stack_by_name_rule for name in ("hstack", "vstack", "row_stack", "dstack", "column_stack")},
    **dict.fromkeys(("aten.diag", "aten.diagflat", "aten.trace"), diag_rule),
    "aten.diag_embed": diag_embed_rule,
    "aten.diagonal_scatter": diagonal_scatter_rule,
    "aten.rot90": turn_rule,
    **dict.fromkeys(("aten.channel_shuffle", "aten.native_channel_shuffle"), channel_shuffle_rule),
    **dict.fromkeys(("aten.block_diag", "aten.cartesian_prod"), block_diag_rule),
}
"""Computed rules, by family."""

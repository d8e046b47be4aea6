"""Pointwise operators and their kin: every dim of the output may be cut, operands broadcast.

In: an op that torch tags `pointwise`, or one of the few it does not tag; an op that fills a tensor, or counts in one.
Out: its rule, names `d0 d1 ...` from the output's dims. Where all elements are alike each cell makes its own part; what
counts positions is made whole (arange), or told where the part lies (tril, masked_scatter). Which operands the op is
linear in stands in `LINEAR`, by the schema's argument names: a set holds if each of its arguments is a tensor, or the
number 0 (x + 3 is not linear in x, where(c, x, 0) is).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.ir.graph import Op, Ref, Tensor
from weft.ops.arguments import call, call_with, family, operand, overload
from weft.ops.build import (
    OpView,
    RuleOf,
    aligned,
    broadcasting,
    fixed_dims,
    numbered_dims,
    rules_of,
    talking,
)
from weft.ops.rule import Call, CellView, Dims, Rule, fixed, names_of
from weft.runtime.operators.algorithms import Exchange

Sets = tuple[tuple[str, ...], ...]

_SELF: Sets = (("self",),)
_BOTH: Sets = (("self", "other"),)
_EACH: Sets = (("self",), ("other",))

_LINEAR = """
div divide true_divide neg negative positive clone contiguous alias alias_copy detach detach_copy lift lift_fresh
lift_fresh_copy to _to_copy type_as real imag conj _conj _conj_physical conj_physical resolve_conj resolve_neg
deg2rad rad2deg
"""

LINEAR: Mapping[str, Sets] = {
    **dict.fromkeys(("aten.add", "aten.sub", "aten.subtract", "aten.rsub", "aten.where"), _BOTH),
    **dict.fromkeys(("aten.mul", "aten.multiply"), _EACH),
    **dict.fromkeys((f"aten.{name}" for name in _LINEAR.split()), _SELF),
    "aten.fill": (("value",),),
    "aten.lerp": (("self", "end"),),
    "aten.masked_fill": (("self", "value"),),
    "aten.addcmul": (("self", "tensor1"), ("self", "tensor2")),
    "aten.addcdiv": (("self", "tensor1"),),
    "aten.complex": (("real", "imag"),),
}

_UNTAGGED = """
absolute alias alias_copy arccos arccosh arcsin arcsinh arctan arctan2 arctanh chalf complex conj contiguous
detach detach_copy divide fill fix floor_divide greater greater_equal hardswish imag isclose isreal less less_equal
lift lift_fresh lift_fresh_copy log_sigmoid logical_and logical_not logical_or logical_xor masked_fill
multiply negative not_equal polar real resolve_conj resolve_neg rsub subtract to true_divide type_as where
zero clamp clip _conj _neg_view _to_copy _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int
_cast_Long _cast_Short __and__ __or__ __xor__ _autocast_to_full_precision _autocast_to_reduced_precision
special_digamma special_erf special_erfc special_erfinv special_exp2 special_expit special_expm1 special_gammainc
special_gammaincc special_gammaln special_i0 special_log1p special_logit special_multigammaln special_ndtr
special_polygamma special_psi special_round special_sinc special_xlogy square heaviside
_prelu_kernel
"""

UNTAGGED = frozenset(f"aten.{name}" for name in _UNTAGGED.split())
"""Pointwise operators that torch does not tag (composites, casts, copies), by family."""

_NOT_ELEMENTWISE = frozenset({"aten.equal"})
"""Tagged pointwise, yet its result is one number."""

BY_EXAMPLE = frozenset({"aten.to.other", "aten.type_as.default"})
"""Operators whose second operand only lends its dtype and device; it need not broadcast."""


def is_pointwise(op: Op) -> bool:
    """True if each element of the output depends on one element of each operand."""
    operator = overload(op.target)
    if operator is None or operator._schema.is_mutable or torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    name = family(op)
    if name in ("aten.max", "aten.min"):
        return op.target.endswith(".other")
    if op.target == "aten.where.default" or name in _NOT_ELEMENTWISE:
        return False
    return torch.Tag.pointwise in operator.tags or name in UNTAGGED


def pointwise_rule(it: OpView) -> Rule:
    """The rule of a pointwise op."""
    dims = numbered_dims(it.result)
    inputs: list[Dims] = []
    for position, tensor in enumerate(it.reads):
        lent = position == 1 and it.op.target in BY_EXAMPLE
        found = _lent(it, dims, tensor) if lent else aligned(dims, it.result, tensor.sizes)
        if found is None:
            raise it.error(f"{it.op.target}: an operand of shape {tensor.sizes} does not broadcast to {it.result}")
        inputs.append(found)
    return it.rule(inputs, [dims] * len(it.makes), linear=_linear(it))


def _lent(it: OpView, dims: Dims, tensor: Tensor) -> Dims:
    """Dims of an operand that only lends its dtype and device: the output's, if it has the output's shape."""
    return dims if tensor.sizes == it.result else fixed_dims(tensor)[0]


def _linear(it: OpView) -> list[list[int]]:
    sets = LINEAR.get(family(it.op), ())
    if not sets or it.args.get("rounding_mode") is not None:
        return []
    found = []
    for names in sets:
        chosen = [it.args[name] for name in names if name in it.args]
        if all(isinstance(value, Ref) or _is_zero(value) for value in chosen):
            found.append([position for value in chosen if (position := operand(value)) is not None])
    return found


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float | complex) and value == 0


def prelu_rule(it: OpView) -> Rule:
    """PReLU: the weight, if it has more than one element, belongs to dim 1."""
    dims, weight = numbered_dims(it.result), it.shapes[1]
    own = dims[1] if len(dims) > 1 and weight and weight[0] > 1 else fixed(1)
    return it.rule([dims, (own,) if weight else ()], [dims])


def copy_rule(it: OpView) -> Rule:
    """What became of `x.copy_(y)`: y in the shape and dtype of x. Torch's own functional form has no derivative."""
    dims = numbered_dims(it.result)
    dtype = it.reads[0].dtype

    def local(op: Op, cell: CellView) -> Call:
        if it.reads[1].dtype == dtype:
            return call("aten.expand.default", Ref("1"), cell.output_shape())
        if it.shapes[1] == it.result:
            return call("aten.to.dtype", Ref("1"), dtype)
        return call_with(op)

    return it.rule([dims, *broadcasting(dims, it.result, it.reads[1:])], [dims], linear=[[1]], local=local)


def complex_rule(it: OpView) -> Rule:
    """view_as_real and view_as_complex: the pair of numbers stays together."""
    return it.text("d* -> d* _" if it.kind != "view_as_complex" else "d* _ -> d*", linear=[[0]], source="view")


def filled_rule(it: OpView) -> Rule:
    """zeros, ones, full, empty, their new_ and _like forms: each cell makes its own part."""
    dims = numbered_dims(it.result)
    inputs = [_lent(it, dims, tensor) for tensor in it.reads]
    # what is made like an operand is told no size
    return it.rule(inputs, [dims], local=_local_filled if "size" in it.args else None)


def _local_filled(op: Op, cell: CellView) -> Call:
    return call_with(op, size=cell.output_shape())


def counted_rule(it: OpView) -> Rule:
    """arange, linspace, eye: position matters, so it is made whole."""
    return it.rule(fixed_dims(*it.reads), fixed_dims(*it.makes))


def triangle_rule(it: OpView) -> Rule:
    """tril, triu: a part has a diagonal of its own."""
    dims = numbered_dims(it.result)
    diagonal = int(it.args["diagonal"])

    def local(op: Op, cell: CellView) -> Call:
        rows, columns = cell.inputs[0][-2:]
        if len(rows) <= 1 and len(columns) <= 1:
            down, right = (ranges[0][0] if ranges else 0 for ranges in (rows, columns))
            return call_with(op, diagonal=diagonal + down - right)
        return call("weft.triangle", Ref("0"), diagonal, rows=rows, columns=columns, upper=op.kind == "triu")

    return it.rule([dims], [dims], linear=[[0]], local=local, source="view")


def masked_scatter_rule(it: OpView) -> Rule:
    """The n-th masked element takes the n-th of the source, which stays whole: cells tell each other where theirs
    lie."""
    dims = numbered_dims(it.result)
    inputs = [*broadcasting(dims, it.result, it.reads[:2]), *fixed_dims(it.reads[2])]

    def made(cell: CellView) -> Call:
        refs = [Ref(str(i)) for i in range(3)]
        return call("weft.masked_scatter", *refs, shape=it.result, at=cell.outputs[0])

    marks = talking(names_of(dims), Exchange(forward=("all_gather",)), made)
    return it.rule(inputs, [dims], linear=[[0, 2]], **marks)


def expect_rule(it: OpView) -> Rule:
    """`weft.expect`: the value as it comes, and truth values that every cell sees."""
    dims = numbered_dims(it.shape)
    return it.rule([dims, *fixed_dims(*it.reads[1:])], [dims], linear=[[0]])


_FILLED = """
zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like
"""
_COUNTED = "arange linspace logspace eye scalar_tensor tril_indices triu_indices range hann_window hamming_window"

RULES: Mapping[str, RuleOf] = {
    "aten.prelu": prelu_rule,
    **rules_of(complex_rule, "view_as_real view_as_real_copy view_as_complex"),
    "aten.copy": copy_rule,
    **rules_of(filled_rule, _FILLED),
    **rules_of(counted_rule, _COUNTED),
    **rules_of(triangle_rule, "tril triu"),
    "aten.masked_scatter": masked_scatter_rule,
    "weft.expect": expect_rule,
}
"""Rules by operator, of those that are not pointwise themselves."""

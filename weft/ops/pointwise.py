"""Pointwise operators: every dim of the output may be cut, operands broadcast.

In: an op that torch tags `pointwise`, or one of the few it does not tag. Out: its rule, names `d0 d1 ...` from the
output's dims. Which operands the op is linear in stands in `LINEAR`, by the schema's argument names: a set holds if
each of its arguments is a tensor, or the number 0 (x + 3 is not linear in x, where(c, x, 0) is).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.errors import RuleError
from weft.ir.graph import Op, Ref, Tensor
from weft.ops.arguments import arguments, call_with, family, operand, overload
from weft.ops.build import aligned, build, fixed, numbered_dims
from weft.ops.rule import Call, CellView, Dims, Rule, RuleOf

Sets = tuple[tuple[str, ...], ...]

_SELF: Sets = (("self",),)
_BOTH: Sets = (("self", "other"),)
_EACH: Sets = (("self",), ("other",))

LINEAR: Mapping[str, Sets] = {
    **dict.fromkeys(("aten.add", "aten.sub", "aten.subtract", "aten.rsub", "aten.where"), _BOTH),
    **dict.fromkeys(("aten.mul", "aten.multiply"), _EACH),
    **dict.fromkeys(("aten.div", "aten.divide", "aten.true_divide"), _SELF),
    **dict.fromkeys(("aten.neg", "aten.negative", "aten.positive", "aten.clone", "aten.contiguous"), _SELF),
    **dict.fromkeys(("aten.alias", "aten.alias_copy", "aten.detach", "aten.detach_copy", "aten.lift"), _SELF),
    **dict.fromkeys(("aten.lift_fresh", "aten.lift_fresh_copy", "aten.to", "aten._to_copy"), _SELF),
    **dict.fromkeys(("aten.type_as", "aten.real", "aten.imag", "aten.conj", "aten._conj"), _SELF),
    **dict.fromkeys(("aten._conj_physical", "aten.conj_physical", "aten.resolve_conj", "aten.resolve_neg"), _SELF),
    **dict.fromkeys(("aten.deg2rad", "aten.rad2deg"), _SELF),
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

_BY_EXAMPLE = frozenset({"aten.to.other", "aten.type_as.default"})
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


def pointwise_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """The rule of a pointwise op."""
    shape = makes[0].sizes
    dims = numbered_dims(shape)
    inputs: list[Dims] = []
    for position, tensor in enumerate(reads):
        found = aligned(dims, shape, tensor.sizes)
        if position == 1 and op.target in _BY_EXAMPLE:
            found = dims if tensor.sizes == shape else tuple(map(fixed, tensor.sizes))
        if found is None:
            raise RuleError(
                f"{op.target}: an operand of shape {tensor.sizes} does not broadcast to {shape}",
                place=op.place,
                remedy="keep the op copied: plan.trans(op, copy(...))",
            )
        inputs.append(found)
    return build(inputs, [dims] * len(makes), reads, makes, linear=_linear(op))


def _linear(op: Op) -> list[list[int]]:
    sets = LINEAR.get(family(op), ())
    if not sets:
        return []
    values = arguments(op)
    if values.get("rounding_mode") is not None:
        return []
    found = []
    for names in sets:
        chosen = [values[name] for name in names if name in values]
        if all(isinstance(value, Ref) or _is_zero(value) for value in chosen):
            found.append([position for value in chosen if (position := operand(value)) is not None])
    return found


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float | complex) and value == 0


def prelu_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """PReLU: the weight, if it has more than one element, belongs to dim 1."""
    dims = numbered_dims(makes[0].sizes)
    weight = reads[1].sizes
    own = dims[1] if len(dims) > 1 else fixed(1)
    weight_dims: Dims = (own if weight[0] > 1 else fixed(1),) if weight else ()
    return build([dims, weight_dims], [dims], reads, makes)


def copy_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """What became of `x.copy_(y)`: y in the shape and dtype of x. Torch's own functional form has no derivative."""
    shape = makes[0].sizes
    dims = numbered_dims(shape)
    source = aligned(dims, shape, reads[1].sizes)
    assert source is not None, f"{reads[1]} does not broadcast to {shape}"
    dtype = reads[0].dtype

    def local(op: Op, cell: CellView) -> Call:
        if reads[1].dtype == dtype:
            return Call("aten.expand.default", (Ref("1"), cell.output_shape()))
        if cell.whole_inputs[1] == shape:
            return Call("aten.to.dtype", (Ref("1"), dtype))
        return call_with(op, {})

    return build([dims, source], [dims], reads, makes, linear=[[1]], local=local)


def complex_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """view_as_real and view_as_complex: the pair of numbers stays together."""
    longer = max(reads[0].sizes, makes[0].sizes, key=len)
    dims = (*numbered_dims(longer[:-1]), fixed(2))
    sides = [dims if len(tensor.sizes) == len(longer) else dims[:-1] for tensor in (reads[0], makes[0])]
    return build(sides[:1], sides[1:], reads, makes, linear=[[0]], source="view")


POINTWISE_LIKE: Mapping[str, RuleOf] = {
    "aten.prelu": prelu_rule,
    **dict.fromkeys(("aten.view_as_real", "aten.view_as_real_copy"), complex_rule),
    "aten.view_as_complex": complex_rule,
    "aten.copy": copy_rule,
}
"""Nearly pointwise operators, by family."""

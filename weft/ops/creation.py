"""Operators that make a tensor from nothing but a shape.

In: an op and its shapes. Out: its rule. Where all elements are alike every dim may be cut, and each cell makes its own
part; a counting one (arange) is made whole and sliced by whoever needs a part. An operand that only lends its dtype
and device shares the output's names if it has the output's shape.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.ir.graph import Op, Tensor
from weft.ops.build import build, fixed, numbered_dims
from weft.ops.rule import Rule, RuleOf
from weft.ops.views import local_like


def filled_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """zeros, ones, full, empty and their new_ forms."""
    shape = makes[0].sizes
    dims = numbered_dims(shape)
    inputs = [dims if tensor.sizes == shape else tuple(map(fixed, tensor.sizes)) for tensor in reads]
    return build(inputs, [dims], reads, makes, local=local_like)


def like_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """zeros_like and its kin: the part's own shape is already right."""
    dims = numbered_dims(makes[0].sizes)
    inputs = [dims if tensor.sizes == makes[0].sizes else tuple(map(fixed, tensor.sizes)) for tensor in reads]
    return build(inputs, [dims], reads, makes)


def counted_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """arange, linspace, eye: position matters, so it is made whole."""
    sides = [tuple(map(fixed, tensor.sizes)) for tensor in (*reads, *makes)]
    return build(sides[: len(reads)], sides[len(reads) :], reads, makes)


_FILLED = "zeros ones full empty new_zeros new_ones new_full new_empty"
_LIKE = "zeros_like ones_like full_like empty_like"
_COUNTED = "arange linspace logspace eye scalar_tensor tril_indices triu_indices range hann_window hamming_window"

CREATION: Mapping[str, RuleOf] = {
    **{f"aten.{name}": filled_rule for name in _FILLED.split()},
    **{f"aten.{name}": like_rule for name in _LIKE.split()},
    **{f"aten.{name}": counted_rule for name in _COUNTED.split()},
}
"""Computed rules, by family."""

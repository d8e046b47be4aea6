"""Reductions and operators along a dim that need no exchange.

In: an op and its shapes. Out: its rule, names after the input's dims. Summed dims may be cut and leave addends;
those of a median, a sort or a running sum may not. All other dims may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import RuleError
from weft.ir.graph import Op, Tensor
from weft.ops.arguments import arguments, call_with, integers, operand, positive
from weft.ops.build import aligned, broadcast, build, fixed, named, numbered_dims
from weft.ops.pieces import replaced
from weft.ops.rule import Call, CellView, Dim, Dims, Rule, RuleOf, dim

_SUMS = frozenset({"aten.sum", "aten.nansum", "aten.count_nonzero"})


def reduced_dims(values: Mapping[str, Any], num_dims: int) -> frozenset[int]:
    """The dims a reduction removes: those named, or all of them."""
    given = values.get("dim")
    listed = integers(given)
    if not listed:
        return frozenset(range(num_dims))
    return frozenset(positive(i, num_dims) for i in listed) if num_dims else frozenset()


def reduction_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """sum, median, mode, ..."""
    values = arguments(op)
    shape = reads[0].sizes
    gone = reduced_dims(values, len(shape))
    source = numbered_dims(shape)
    keep = bool(values.get("keepdim", False))
    target = tuple(dim() if i in gone else source[i] for i in range(len(shape)) if keep or i not in gone)
    names = {name for i in gone for name in source[i].names}
    sums = ".".join(op.target.split(".")[:2]) in _SUMS
    return build(
        [source],
        [target] * len(makes),
        reads,
        makes,
        summed=names if sums else (),
        frozen=() if sums else names,
        linear=[[0]] if op.kind == "sum" else (),
    )


def sum_to_size_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """The transpose of an expand; the size asked for speaks of the whole, so only the summed dims may be cut."""
    shape, result = reads[0].sizes, makes[0].sizes
    missing = len(shape) - len(result)
    source: list[Dim] = list(numbered_dims(shape))
    target: list[Dim] = []
    summed = {name for one in source[:missing] for name in one.names}
    for i, size in enumerate(result):
        if size == shape[missing + i]:
            source[missing + i] = fixed(size)
            target.append(fixed(size))
        else:
            summed |= source[missing + i].names
            target.append(dim())
    return build([tuple(source)], [tuple(target)], reads, makes, summed=summed, linear=[[0]])


def along_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """cumsum, sort, topk, diff: the dim they run along may not be cut. Outputs may be shorter there."""
    values = arguments(op)
    shape = reads[0].sizes
    given = 0 if op.kind == "msort" else values["dim"]
    if given is None:
        raise RuleError(f"{op.target} without a dim has no rule", place=op.place, remedy="name the dim")
    if not shape:
        return build([()], [()] * len(makes), reads, makes)
    at = positive(given, len(shape))
    source = numbered_dims(shape)
    outputs: list[Dims] = []
    for tensor in makes:
        same = tensor.sizes[at] == shape[at]
        outputs.append(source if same else replaced(source, at, fixed(tensor.sizes[at])))
    if len(reads) > 1:
        raise RuleError(f"{op.target} with several tensors has no rule", place=op.place)
    linear = [[0]] if op.kind in ("cumsum", "diff") else []
    return build([source], outputs, reads, makes, frozen=source[at].names, linear=linear)


def quantile_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Several quantiles are a new first dim. Without a dim all elements are one list."""
    values = arguments(op)
    shape = reads[0].sizes
    gone = reduced_dims(values, len(shape))
    source = tuple(fixed(size) if i in gone else named(f"d{i}", size) for i, size in enumerate(shape))
    keep = bool(values["keepdim"])
    left = tuple(dim() if i in gone else one for i, one in enumerate(source) if keep or i not in gone)
    asked = [tuple(map(fixed, tensor.sizes)) for tensor in reads[1:]]
    several = asked[0] if asked else ()
    return build([source, *asked], [(*several, *left)], reads, makes)


def trapezoid_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Neighbours along a dim are added up; places along it may be given for all rows, or for each."""
    shape = reads[0].sizes
    at = positive(arguments(op)["dim"], len(shape))
    source = tuple(fixed(size) if i == at else named(f"d{i}", size) for i, size in enumerate(shape))
    running = op.kind == "cumulative_trapezoid"
    target = replaced(source, at, fixed(makes[0].sizes[at])) if running else (*source[:at], *source[at + 1 :])
    places = [source if tensor.sizes == shape else tuple(map(fixed, tensor.sizes)) for tensor in reads[1:]]
    return build([source, *places], [target], reads, makes, linear=[[0]])


def slope_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """gradient: differences along one dim or several, one result for each; these dims stay whole."""
    shape = reads[0].sizes
    along = reduced_dims(arguments(op), len(shape))
    dims = tuple(fixed(size) if i in along else named(f"d{i}", size) for i, size in enumerate(shape))
    places = [tuple(map(fixed, tensor.sizes)) for tensor in reads[1:]]
    return build([dims, *places], [dims] * len(makes), reads, makes, linear=[[0]])


def renorm_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Each index of one dim has a norm over all others."""
    at = positive(arguments(op)["dim"], len(reads[0].sizes))
    dims = tuple(named(f"d{i}", size) if i == at else fixed(size) for i, size in enumerate(reads[0].sizes))
    return build([dims], [dims], reads, makes)


def paired_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """cross, linalg_vecdot: two operands that broadcast, met along one dim."""
    values = arguments(op)
    removed = not op.kind.endswith("cross")
    longest = max(len(tensor.sizes) for tensor in reads)
    at = _met_dim(values, [tensor.sizes for tensor in reads], longest)
    shape = list(makes[0].sizes)
    if removed:
        shape.insert(at, broadcast([tensor.sizes for tensor in reads])[at])
    dims = numbered_dims(shape)
    inputs = [aligned(dims, shape, tensor.sizes) for tensor in reads]
    target = (*dims[:at], *dims[at + 1 :]) if removed else dims
    summed = op.kind == "linalg_vecdot"
    return build(
        [found for found in inputs if found is not None],
        [target],
        reads,
        makes,
        summed=dims[at].names if summed else (),
        frozen=() if summed else dims[at].names,
        linear=[[0], [1]],
        local=_local_paired,
    )


def _local_paired(op: Op, cell: CellView) -> Call:
    # `cross` without a dim takes the first of size 3, and a part may have another one
    values = arguments(op)
    longest = max(map(len, cell.whole_inputs))
    return call_with(op, {"dim": _met_dim(values, cell.whole_inputs, longest)})


def _met_dim(values: Mapping[str, Any], shapes: Sequence[Sequence[int]], longest: int) -> int:
    if values["dim"] is not None:
        return positive(values["dim"], longest)
    return next(i for i, size in enumerate(shapes[operand(values["self"]) or 0]) if size == 3)


_REDUCTIONS = """
sum nansum count_nonzero median nanmedian mode kthvalue
"""
_ALONG = "cumsum cumprod cummax cummin logcumsumexp sort argsort msort topk diff"

REDUCTIONS: Mapping[str, RuleOf] = {
    **{f"aten.{name}": reduction_rule for name in _REDUCTIONS.split()},
    **{f"aten.{name}": along_rule for name in _ALONG.split()},
    "aten.sum_to_size": sum_to_size_rule,
    **dict.fromkeys(("aten.cross", "aten.linalg_cross"), paired_rule),
    **dict.fromkeys(("aten.quantile", "aten.nanquantile"), quantile_rule),
    **dict.fromkeys(("aten.trapezoid", "aten.trapz", "aten.cumulative_trapezoid"), trapezoid_rule),
    "aten.gradient": slope_rule,
    "aten.renorm": renorm_rule,
    "aten.linalg_vecdot": paired_rule,
}
"""Computed rules, by family."""

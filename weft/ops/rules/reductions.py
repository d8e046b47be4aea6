"""Reductions, softmax and operators along a dim: what happens when that dim is cut.

In: an op and its shapes. Out: its rule, names `d0 d1 ...` from the operand's dims. Sums and means leave addends.
Variances, extremes, products and log-sum-exp talk along the cut dims and leave complete results; softmax talks too and
leaves the cell's own part. The dims of a median, a sort or a running sum may not be cut. All other dims may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.ir.graph import Ref
from weft.ops.arguments import call, call_with, family, integers, positive
from weft.ops.build import (
    OpView,
    RuleOf,
    broadcast,
    broadcasting,
    fixed_dims,
    named,
    numbered_dims,
    replaced,
    rules_of,
    talking,
    when_cut,
)
from weft.ops.rule import Call, CellView, Dim, Dims, Rule, dim, fixed, names_of
from weft.ops.rules.pointwise import pointwise_rule
from weft.runtime.operators.algorithms import Exchange

Options = Callable[[OpView, CellView], dict[str, Any]]
"""What a function of the runtime is told beside the reduced dims, from the op and the cell."""

SUMMED = frozenset({"aten.sum", "aten.nansum", "aten.count_nonzero"})
ONCE = Exchange(forward=("all_reduce",))
TWICE = Exchange(forward=("all_reduce", "all_reduce"))


def reduced_dims(it: OpView) -> tuple[int, ...]:
    """The dims an operator reduces, from the left; none given means all."""
    listed, count = integers(it.args.get("dim")), len(it.shape)
    return tuple(positive(d, count) for d in listed) if listed and count else tuple(range(count))


def keeps(it: OpView) -> bool:
    """Whether reduced dims stay, with one index."""
    return bool(it.args.get("keepdim", False))


def left_dims(it: OpView, dims: Dims, reduced: Sequence[int]) -> Dims:
    """What a reduction leaves of its operand's dims."""
    return tuple(dim() if d in reduced else one for d, one in enumerate(dims) if keeps(it) or d not in reduced)


def reduction_rule(it: OpView) -> Rule:
    """sum, median, mode, ...: the op's own call on each part."""
    reduced, source = reduced_dims(it), numbered_dims(it.shape)
    names = names_of(source[d] for d in reduced)
    marks: dict[str, Any] = {"summed" if family(it.op) in SUMMED else "frozen": names}
    linear = [[0]] if it.kind == "sum" else []
    return it.rule([source], [left_dims(it, source, reduced)] * len(it.makes), linear=linear, **marks)


def mean_rule(it: OpView) -> Rule:
    """A part's sum over the whole count: an addend, no communication."""
    reduced, dims = reduced_dims(it), numbered_dims(it.shape)
    names = names_of(dims[d] for d in reduced)
    part = call("weft.mean_part", Ref("0"), reduced, keeps(it), count=_count(it), dtype=it.args["dtype"])
    local = when_cut(names, part, talks=False)
    return it.rule([dims], [left_dims(it, dims, reduced)], summed=names, linear=[[0]], local=local)


def _count(it: OpView) -> int:
    return math.prod(it.shape[d] for d in reduced_dims(it))


def by_runtime(target: str, exchange: Exchange, options: Options = lambda it, cell: {}, **more: Any) -> RuleOf:
    """The rule of a reduction whose cells talk: where reduced dims are cut, each calls a function of the runtime with
    its part, the dims, whether they are kept, and options."""

    return lambda it: talking_rule(it, reduced_dims(it), target, exchange, lambda cell: more | options(it, cell))


def talking_rule(
    it: OpView, reduced: Sequence[int], target: str, exchange: Exchange, told: Callable[[CellView], dict[str, Any]]
) -> Rule:
    """All outputs lack the reduced names, along which the cells talk."""
    dims = numbered_dims(it.shape)
    names = names_of(dims[d] for d in sorted(reduced))

    def made(cell: CellView) -> Call:
        return call(target, Ref("0"), tuple(reduced), keeps(it), **told(cell))

    return it.rule([dims], [left_dims(it, dims, reduced)] * len(it.makes), **talking(names, exchange, made))


def _freedom(it: OpView, cell: CellView) -> dict[str, Any]:
    given = it.args["correction"] if "correction" in it.args else float(it.args["unbiased"])
    return {"count": _count(it), "correction": 1.0 if given is None else float(given)}


def _positions(it: OpView, cell: CellView) -> dict[str, Any]:
    reduced = reduced_dims(it)
    return {"shape": tuple(it.shape[d] for d in reduced), "at": tuple(cell.inputs[0][d] for d in reduced)}


def _dtype(it: OpView, cell: CellView) -> dict[str, Any]:
    return {"dtype": it.args["dtype"]}


def extreme(kind: str) -> RuleOf:
    """`amax`, `amin`, and `max`, `min` of all elements: ties share the gradient. Of a dim: the first of equals counts.
    Of two tensors: element by element."""
    both = Exchange(forward=("all_reduce",), backward=("all_reduce",))
    forms = {
        "other": pointwise_rule,
        "dim": by_runtime("weft.extreme_and_index", TWICE, _positions, kind=kind),
        "": by_runtime("weft.extreme", both, kind=kind),
    }
    return lambda it: forms.get(it.op.target.split(".")[-1], forms[""])(it)


def softmax_rule(it: OpView) -> Rule:
    """softmax and log_softmax."""
    dims, along = numbered_dims(it.shape), positive(it.args["dim"], len(it.shape))
    names = names_of(dims[along : along + 1])
    dtype = it.makes[0].dtype if it.makes[0].dtype != it.reads[0].dtype else None
    made = call("weft.softmax", Ref("0"), along, dtype=dtype, log="log" in it.kind)
    exchange = Exchange(forward=("all_reduce", "all_reduce"), backward=("all_reduce",))
    return it.rule([dims], [dims], **talking(names, exchange, made))


def sum_to_size_rule(it: OpView) -> Rule:
    """The transpose of an expand; the size asked for speaks of the whole, so only the summed dims may be cut."""
    missing = len(it.shape) - len(it.result)
    source: list[Dim] = list(numbered_dims(it.shape))
    target: list[Dim] = []
    summed = {name for one in source[:missing] for name in one.names}
    for i, size in enumerate(it.result):
        if size == it.shape[missing + i]:
            source[missing + i] = fixed(size)
            target.append(fixed(size))
        else:
            summed |= source[missing + i].names
            target.append(dim())
    return it.rule([tuple(source)], [tuple(target)], summed=summed, linear=[[0]])


def along_rule(it: OpView) -> Rule:
    """cumsum, sort, topk, diff: the dim they run along may not be cut. Outputs may be shorter there."""
    given = 0 if it.kind == "msort" else it.args["dim"]
    if given is None:
        raise it.error(f"{it.op.target} without a dim has no rule", remedy="name the dim")
    if len(it.reads) > 1:
        raise it.error(f"{it.op.target} with several tensors has no rule")
    if not it.shape:
        return it.rule([()], [()] * len(it.makes))
    at = positive(given, len(it.shape))
    source = numbered_dims(it.shape)
    lengths = [tensor.sizes[at] for tensor in it.makes]
    outputs = [source if length == it.shape[at] else replaced(source, at, fixed(length)) for length in lengths]
    linear = [[0]] if it.kind in ("cumsum", "diff") else []
    return it.rule([source], outputs, frozen=source[at].names, linear=linear)


def quantile_rule(it: OpView) -> Rule:
    """Several quantiles are a new first dim. Without a dim all elements are one list."""
    reduced = reduced_dims(it)
    source = numbered_dims(it.shape, whole=reduced)
    asked = fixed_dims(*it.reads[1:])
    several = asked[0] if asked else ()
    return it.rule([source, *asked], [(*several, *left_dims(it, source, reduced))])


def trapezoid_rule(it: OpView) -> Rule:
    """Neighbours along a dim are added up; places along it may be given for all rows, or for each."""
    at = positive(it.args["dim"], len(it.shape))
    source = numbered_dims(it.shape, whole=(at,))
    running = it.kind == "cumulative_trapezoid"
    target = replaced(source, at, fixed(it.result[at])) if running else replaced(source, at)
    places = [source if tensor.sizes == it.shape else fixed_dims(tensor)[0] for tensor in it.reads[1:]]
    return it.rule([source, *places], [target], linear=[[0]])


def slope_rule(it: OpView) -> Rule:
    """gradient: differences along one dim or several, one result for each; these dims stay whole."""
    return it.beside(reduced_dims(it), linear=[[0]])


def renorm_rule(it: OpView) -> Rule:
    """Each index of one dim has a norm over all others."""
    at = positive(it.args["dim"], len(it.shape))
    dims = replaced(fixed_dims(it.reads[0])[0], at, named(f"d{at}", it.shape[at]))
    return it.rule([dims], [dims])


def paired_rule(it: OpView) -> Rule:
    """cross, linalg_vecdot: two operands that broadcast, met along one dim."""
    summed = it.kind == "linalg_vecdot"
    at = _met_dim(it)
    shape = broadcast(it.shapes)
    dims = numbered_dims(shape)
    marks: dict[str, Any] = {"summed" if summed else "frozen": dims[at].names}
    target = replaced(dims, at) if summed else dims
    inputs = broadcasting(dims, shape, it.reads)
    # `cross` without a dim takes the first of size 3, and a part may have another one
    return it.rule(inputs, [target], linear=[[0], [1]], local=lambda op, cell: call_with(op, dim=at), **marks)


def _met_dim(it: OpView) -> int:
    if it.args["dim"] is not None:
        return positive(it.args["dim"], max(map(len, it.shapes)))
    return it.shapes[it.where("self")].index(3)


RULES: Mapping[str, RuleOf] = {
    **rules_of(reduction_rule, "sum nansum count_nonzero median nanmedian mode kthvalue"),
    **rules_of(along_rule, "cumsum cumprod cummax cummin logcumsumexp sort argsort msort topk diff"),
    "aten.mean": mean_rule,
    "aten.nanmean": by_runtime("weft.nanmean_part", Exchange(output="partial", forward=("all_reduce",)), _dtype),
    "aten.var": by_runtime("weft.variance_only", TWICE, _freedom, root=False),
    "aten.std": by_runtime("weft.variance_only", TWICE, _freedom, root=True),
    "aten.var_mean": by_runtime("weft.variance", TWICE, _freedom, root=False),
    "aten.std_mean": by_runtime("weft.variance", TWICE, _freedom, root=True),
    **rules_of(extreme("max"), "amax max"),
    **rules_of(extreme("min"), "amin min"),
    "aten.argmax": by_runtime("weft.extreme_index", TWICE, _positions, kind="max"),
    "aten.argmin": by_runtime("weft.extreme_index", TWICE, _positions, kind="min"),
    "aten.aminmax": by_runtime("weft.aminmax", Exchange(forward=("all_reduce",) * 2, backward=("all_reduce",) * 2)),
    **rules_of(by_runtime("weft.truth", ONCE, kind="max"), "any _is_any_true"),
    **rules_of(by_runtime("weft.truth", ONCE, kind="min"), "all _is_all_true"),
    "aten.prod": by_runtime("weft.prod", Exchange(forward=("all_gather",)), _dtype),
    "aten.logsumexp": by_runtime("weft.logsumexp", TWICE),
    **rules_of(softmax_rule, "softmax _softmax log_softmax _log_softmax"),
    "aten.sum_to_size": sum_to_size_rule,
    **rules_of(paired_rule, "cross linalg_cross linalg_vecdot"),
    **rules_of(quantile_rule, "quantile nanquantile"),
    **rules_of(trapezoid_rule, "trapezoid trapz cumulative_trapezoid"),
    "aten.gradient": slope_rule,
    "aten.renorm": renorm_rule,
}
"""Rules by operator."""

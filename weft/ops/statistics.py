"""Rules of reductions that are more than a sum, and of softmax: what happens when the reduced dim is cut.

In: an op and the tensors it reads and makes. Out: its rule, names `d0 d1 ...` from the operand's dims. A mean leaves
addends. Variances, extremes and log-sum-exp talk along the cut dims and leave complete results; softmax talks too and
leaves the cell's own part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.ir.graph import Op, Ref, Tensor
from weft.ops.arguments import arguments, integers, positive
from weft.ops.build import build, numbered_dims
from weft.ops.exchange import Told, call, names_of, told_when_cut, with_exchange
from weft.ops.pointwise import pointwise_rule
from weft.ops.rule import Call, CellView, Dims, Exchange, Group, Rule, RuleOf, dim

Reads = tuple[Tensor, ...]

_X = Ref("0")


def reduced_dims(arg: Any, num_dims: int) -> tuple[int, ...]:
    """The dims an operator reduces, from the left; none given means all."""
    given = integers(arg)
    return tuple(positive(d, num_dims) for d in given) if given else tuple(range(num_dims))


def left_dims(dims: Dims, reduced: tuple[int, ...], keepdim: bool) -> Dims:
    """What a reduction leaves of its operand's dims."""
    if keepdim:
        return tuple(dim() if d in reduced else one for d, one in enumerate(dims))
    return tuple(one for d, one in enumerate(dims) if d not in reduced)


def along_names(dims: Dims, reduced: tuple[int, ...]) -> tuple[str, ...]:
    """The names of the reduced dims."""
    return names_of(tuple(dims[d] for d in sorted(reduced)))


def mean(op: Op, reads: Reads, makes: Reads) -> Rule:
    """A part's sum over the whole count: an addend, no communication."""
    args = arguments(op)
    sizes = reads[0].sizes
    reduced = reduced_dims(args.get("dim"), len(sizes))
    keepdim = bool(args.get("keepdim", False))
    dims = numbered_dims(sizes)
    names = along_names(dims, reduced)
    count = math.prod(sizes[d] for d in reduced)

    def part(op: Op, cell: CellView, _: tuple[Group, ...]) -> Call:
        return call("weft.mean_part", _X, reduced, keepdim, count=count, dtype=args["dtype"])

    return build(
        [dims],
        [left_dims(dims, reduced, keepdim)],
        reads,
        makes,
        summed=names,
        linear=[[0]],
        local=told_when_cut(names, part),
    )


def reduction(reads: Reads, makes: Reads, reduced: tuple[int, ...], keepdim: bool, kind: Exchange, told: Told) -> Rule:
    """All outputs lack the reduced names, along which the algorithm talks."""
    dims = numbered_dims(reads[0].sizes)
    names = along_names(dims, reduced)
    left = left_dims(dims, reduced, keepdim)
    rule = build([dims], [left] * len(makes), reads, makes, local=told_when_cut(names, told))
    return with_exchange(rule, dict.fromkeys(names, kind))


def _variance(root: bool, pair: bool) -> RuleOf:
    def rule(op: Op, reads: Reads, makes: Reads) -> Rule:
        args = arguments(op)
        sizes = reads[0].sizes
        reduced = reduced_dims(args.get("dim"), len(sizes))
        keepdim = bool(args.get("keepdim", False))
        correction = args["correction"] if "correction" in args else float(args["unbiased"])
        count = math.prod(sizes[d] for d in reduced)

        def told(op: Op, cell: CellView, comms: tuple[Group, ...]) -> Call:
            return call(
                "weft.variance" if pair else "weft.variance_only",
                _X,
                reduced,
                keepdim,
                count=count,
                correction=1.0 if correction is None else float(correction),
                root=root,
                comms=comms,
            )

        return reduction(reads, makes, reduced, keepdim, Exchange(forward=("all_reduce", "all_reduce")), told)

    return rule


def _extreme(kind: str) -> RuleOf:
    """`amax`, `amin`, and `max`, `min` of all elements: ties share the gradient."""

    def rule(op: Op, reads: Reads, makes: Reads) -> Rule:
        if op.target.endswith(".other"):
            return pointwise_rule(op, reads, makes)
        if op.target.endswith(".dim"):
            return _extreme_index(kind, "weft.extreme_and_index")(op, reads, makes)
        args = arguments(op)
        reduced = reduced_dims(args.get("dim"), len(reads[0].sizes))
        keepdim = bool(args.get("keepdim", False))

        def told(op: Op, cell: CellView, comms: tuple[Group, ...]) -> Call:
            return call("weft.extreme", _X, reduced, keepdim, kind=kind, comms=comms)

        return reduction(
            reads, makes, reduced, keepdim, Exchange(forward=("all_reduce",), backward=("all_reduce",)), told
        )

    return rule


def _extreme_index(kind: str, target: str) -> RuleOf:
    """`max.dim`, `argmax` and their twins: the first of equal elements counts."""

    def rule(op: Op, reads: Reads, makes: Reads) -> Rule:
        args = arguments(op)
        sizes = reads[0].sizes
        reduced = reduced_dims(args["dim"], len(sizes))
        keepdim = bool(args["keepdim"])

        def told(op: Op, cell: CellView, comms: tuple[Group, ...]) -> Call:
            return call(
                target,
                _X,
                reduced,
                keepdim,
                kind=kind,
                shape=tuple(sizes[d] for d in reduced),
                at=tuple(cell.inputs[0][d] for d in reduced),
                comms=comms,
            )

        return reduction(reads, makes, reduced, keepdim, Exchange(forward=("all_reduce", "all_reduce")), told)

    return rule


def logsumexp(op: Op, reads: Reads, makes: Reads) -> Rule:
    """Complete on every cell; its gradient needs no exchange."""
    args = arguments(op)
    reduced = reduced_dims(args["dim"], len(reads[0].sizes))
    keepdim = bool(args["keepdim"])

    def told(op: Op, cell: CellView, comms: tuple[Group, ...]) -> Call:
        return call("weft.logsumexp", _X, reduced, keepdim=keepdim, comms=comms)

    return reduction(reads, makes, reduced, keepdim, Exchange(forward=("all_reduce", "all_reduce")), told)


def _truth(kind: str) -> RuleOf:
    """`any`, `all`: the largest or smallest of truth values."""

    def rule(op: Op, reads: Reads, makes: Reads) -> Rule:
        args = arguments(op)
        reduced = reduced_dims(args.get("dim"), len(reads[0].sizes))
        keepdim = bool(args.get("keepdim", False))

        def told(op: Op, cell: CellView, comms: tuple[Group, ...]) -> Call:
            return call("weft.truth", _X, reduced, keepdim, kind=kind, comms=comms)

        return reduction(reads, makes, reduced, keepdim, Exchange(forward=("all_reduce",)), told)

    return rule


def aminmax(op: Op, reads: Reads, makes: Reads) -> Rule:
    """Both extremes, each as `amin` and `amax`."""
    args = arguments(op)
    reduced = reduced_dims(args["dim"], len(reads[0].sizes))
    keepdim = bool(args["keepdim"])

    def told(op: Op, cell: CellView, comms: tuple[Group, ...]) -> Call:
        return call("weft.aminmax", _X, reduced, keepdim, comms=comms)

    exchange = Exchange(forward=("all_reduce",) * 2, backward=("all_reduce",) * 2)
    return reduction(reads, makes, reduced, keepdim, exchange, told)


def prod(op: Op, reads: Reads, makes: Reads) -> Rule:
    """Each cell multiplies its own part; all parts are then multiplied in the same order everywhere."""
    args = arguments(op)
    reduced = reduced_dims(args.get("dim"), len(reads[0].sizes))
    keepdim = bool(args.get("keepdim", False))

    def told(op: Op, cell: CellView, comms: tuple[Group, ...]) -> Call:
        return call("weft.prod", _X, reduced, keepdim, dtype=args["dtype"], comms=comms)

    return reduction(reads, makes, reduced, keepdim, Exchange(forward=("all_gather",)), told)


def nanmean(op: Op, reads: Reads, makes: Reads) -> Rule:
    """The count of numbers is asked of all cells; the sums are addends."""
    args = arguments(op)
    reduced = reduced_dims(args["dim"], len(reads[0].sizes))
    keepdim = bool(args["keepdim"])

    def told(op: Op, cell: CellView, comms: tuple[Group, ...]) -> Call:
        return call("weft.nanmean_part", _X, reduced, keepdim, dtype=args["dtype"], comms=comms)

    exchange = Exchange(output="partial", forward=("all_reduce",))
    return reduction(reads, makes, reduced, keepdim, exchange, told)


def _softmax(log: bool) -> RuleOf:
    def rule(op: Op, reads: Reads, makes: Reads) -> Rule:
        args = arguments(op)
        along = positive(args["dim"], len(reads[0].sizes))
        dims = numbered_dims(reads[0].sizes)
        names = along_names(dims, (along,) if dims else ())
        dtype = makes[0].dtype if makes[0].dtype != reads[0].dtype else None

        def told(op: Op, cell: CellView, comms: tuple[Group, ...]) -> Call:
            return call("weft.softmax", _X, along, dtype=dtype, log=log, comms=comms)

        exchange = Exchange(forward=("all_reduce", "all_reduce"), backward=("all_reduce",))
        rule = build([dims], [dims], reads, makes, local=told_when_cut(names, told))
        return with_exchange(rule, dict.fromkeys(names, exchange))

    return rule


def statistics_rules() -> Mapping[str, RuleOf]:
    """Rules by operator."""
    return {
        "aten.mean": mean,
        "aten.var": _variance(root=False, pair=False),
        "aten.std": _variance(root=True, pair=False),
        "aten.var_mean": _variance(root=False, pair=True),
        "aten.std_mean": _variance(root=True, pair=True),
        "aten.amax": _extreme("max"),
        "aten.amin": _extreme("min"),
        "aten.max": _extreme("max"),
        "aten.min": _extreme("min"),
        "aten.argmax": _extreme_index("max", "weft.extreme_index"),
        "aten.argmin": _extreme_index("min", "weft.extreme_index"),
        "aten.logsumexp": logsumexp,
        "aten.any": _truth("max"),
        "aten.all": _truth("min"),
        "aten._is_any_true": _truth("max"),
        "aten._is_all_true": _truth("min"),
        "aten.aminmax": aminmax,
        "aten.prod": prod,
        "aten.nanmean": nanmean,
        "aten.softmax": _softmax(log=False),
        "aten._softmax": _softmax(log=False),
        "aten.log_softmax": _softmax(log=True),
        "aten._log_softmax": _softmax(log=True),
    }

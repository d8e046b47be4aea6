"""Rules of loss functions.

In: an op and the tensors it reads and makes. Out: its rule. Cross entropy and nll loss name rows `n s0 s1 ...` and
classes `c`: with classes cut every cell has the complete loss, with rows cut a reduced loss is a sum of addends whose
denominator (rows that are not ignored, or their weights) is counted over all cells. Pointwise losses name dims `d0 d1
...`; a mean divides by the whole count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.errors import RuleError
from weft.ir.graph import Op, Ref, Tensor
from weft.ir.ranges import whole
from weft.ops.arguments import arguments, call_with, operand
from weft.ops.build import aligned, build, named, numbered_dims
from weft.ops.exchange import call, groups, is_empty, names_of, own_call, told_when_cut, with_exchange
from weft.ops.row_losses import row_loss_rules
from weft.ops.rule import Call, CellView, Dims, Exchange, Group, Local, Rule, RuleOf

Reads = tuple[Tensor, ...]

NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for `reduction`."""

_POINTWISE = (
    "aten.mse_loss",
    "aten.l1_loss",
    "aten.smooth_l1_loss",
    "aten.huber_loss",
    "aten.soft_margin_loss",
    "aten.margin_ranking_loss",
    "aten.hinge_embedding_loss",
    "aten.poisson_nll_loss",
    "aten.binary_cross_entropy",
    "aten.binary_cross_entropy_with_logits",
    "aten.kl_div",
)

_OWN_COUNT = tuple(f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"))


def cross_entropy(op: Op, reads: Reads, makes: Reads) -> Rule:
    """Class indices or, if the target has the shape of the scores, class probabilities."""
    soft = reads[1].sizes == reads[0].sizes
    return _classified(op, reads, makes, soft=soft, normalised=False)


def nll_loss(op: Op, reads: Reads, makes: Reads) -> Rule:
    """As cross entropy, of log-probabilities."""
    return _classified(op, reads, makes, soft=False, normalised=True)


def _classified(op: Op, reads: Reads, makes: Reads, *, soft: bool, normalised: bool) -> Rule:
    args = arguments(op)
    sizes = reads[0].sizes
    kind = named("c", sizes[0 if len(sizes) == 1 else 1])
    rows = (named("n", sizes[0]), *numbered_dims(sizes[2:], "s")) if len(sizes) > 1 else ()
    dims = (*rows[:1], kind, *rows[1:])
    weight = operand(args["weight"])
    held: dict[int | None, Dims] = {0: dims, 1: dims if soft else rows, weight: (kind,)}
    reduction = int(args["reduction"])
    names = names_of(rows)
    counted = reduction == MEAN and not soft
    # the gradient of the weights in the denominator would have to be exchanged too
    frozen = (*names, "c") if weight is not None and reads[weight].needs_grad and not soft else ()
    local = _soft_local(args, sizes) if soft else _hard_local(args, sizes, names, normalised)
    rule = build(
        [held[i] for i in range(len(reads))],
        [rows if reduction == NONE else ()],
        reads,
        makes,
        summed=() if reduction == NONE or counted else names,
        frozen=frozen,
        local=local,
    )
    exchanges = {"c": _class_exchange(args, normalised, soft)}
    if counted:
        exchanges |= dict.fromkeys(names, Exchange("partial", "partial", ("all_reduce",)))
    return with_exchange(rule, {name: found for name, found in exchanges.items() if name not in frozen})


def _class_exchange(args: Mapping[str, Any], normalised: bool, soft: bool) -> Exchange:
    """Largest score and sum of exponentials, then what each loss picks from its classes. None in backward."""
    weighted = args["weight"] is not None
    smoothed = args.get("label_smoothing", 0.0) > 0
    picks = 2 if soft else 1 + weighted + (1 + weighted) * smoothed
    return Exchange("copy", "copy", ("all_reduce",) * (picks + 2 * (not normalised)))


def _class_dim(sizes: tuple[int, ...]) -> int:
    return 0 if len(sizes) == 1 else 1


def _hard_local(args: Mapping[str, Any], sizes: tuple[int, ...], rows: tuple[str, ...], normalised: bool) -> Local:
    at = _class_dim(sizes)

    def local(op: Op, cell: CellView) -> Call:
        classes = groups(cell, ("c",))
        counted = groups(cell, rows) if args["reduction"] == MEAN else ()
        if not classes and not counted and not is_empty(cell):
            return _whole(op, args, sizes, normalised)
        return call(
            "weft.cross_entropy",
            Ref("0"),
            Ref("1"),
            args["weight"],
            reduction=args["reduction"],
            ignore_index=int(args["ignore_index"]),
            label_smoothing=args.get("label_smoothing", 0.0),
            log_probabilities=normalised,
            ranges=cell.inputs[0][at] if classes else whole(sizes[at]),
            num_classes=sizes[at],
            rows=counted,
            classes=classes,
        )

    return local


def _whole(op: Op, args: Mapping[str, Any], sizes: tuple[int, ...], normalised: bool) -> Call:
    """The loss of whole rows, all of them here."""
    plain = args["weight"] is None and args.get("label_smoothing", 0.0) == 0 and args["reduction"] != NONE
    if normalised or not plain or len(sizes) != 2:
        return own_call(op)
    options = {"reduction": int(args["reduction"]), "ignore_index": int(args["ignore_index"])}
    return call("weft.entropy", Ref("0"), Ref("1"), **options)


def _soft_local(args: Mapping[str, Any], sizes: tuple[int, ...]) -> Local:
    at = _class_dim(sizes)

    def local(op: Op, cell: CellView) -> Call:
        if not cell.cut:
            return own_call(op)
        return call(
            "weft.soft_cross_entropy",
            Ref("0"),
            Ref("1"),
            args["weight"],
            reduction=args["reduction"],
            label_smoothing=args["label_smoothing"],
            num_classes=sizes[at],
            count=math.prod(sizes) // sizes[at],
            classes=groups(cell, ("c",)),
        )

    return local


def pointwise_loss(op: Op, reads: Reads, makes: Reads) -> Rule:
    """A loss of each element, then `reduction`."""
    shape = _broadcast(reads)
    dims = numbered_dims(shape)
    inputs = [aligned(dims, shape, tensor.sizes) for tensor in reads]
    assert all(found is not None for found in inputs), f"{op.name}: operands do not broadcast"
    reduction = int(arguments(op)["reduction"])
    if reduction == MEAN and op.target in _OWN_COUNT and reads[0].sizes != reads[1].sizes:
        raise RuleError(
            f"{op.target} of operands that broadcast: torch divides each gradient by the size of that operand alone",
            place=op.place,
            remedy="expand the operands first, as torch.nn.functional does",
        )
    names = names_of(dims)

    def part(op: Op, cell: CellView, _: tuple[Group, ...]) -> Call:
        summed = call_with(op, {"reduction": SUM})
        return call("weft.loss_part", op.target, *summed.args, **dict(summed.kwargs), count=math.prod(shape))

    return build(
        [found for found in inputs if found is not None],
        [dims if reduction == NONE else ()],
        reads,
        makes,
        summed=() if reduction == NONE else names,
        local=told_when_cut(names, part) if reduction == MEAN else None,
    )


def _broadcast(reads: Reads) -> tuple[int, ...]:
    num_dims = max(len(tensor.sizes) for tensor in reads)
    padded = [(1,) * (num_dims - len(tensor.sizes)) + tensor.sizes for tensor in reads]
    return tuple(next((s for s in column if s != 1), 1) for column in zip(*padded, strict=True))


def loss_rules() -> Mapping[str, RuleOf]:
    """Rules by operator."""
    return {
        "aten.cross_entropy_loss": cross_entropy,
        "aten.nll_loss": nll_loss,
        "aten.nll_loss2d": nll_loss,
        "aten.nll_loss_nd": nll_loss,
        **dict.fromkeys(_POINTWISE, pointwise_loss),
        **row_loss_rules(),
    }

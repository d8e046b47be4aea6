"""Rules of loss functions.

In: an op and the tensors it reads and makes. Out: its rule. Cross entropy and nll loss name rows `n s0 s1 ...` and
classes `c`: with classes cut every cell has the complete loss, with rows cut a reduced loss is a sum of addends whose
denominator (rows that are not ignored, or their weights) is counted over all cells. Pointwise losses name dims `d0 d1
...`; a mean divides by the whole count. Losses that weigh a whole row at once (margins, triplets, cosine embedding,
ctc) may be cut by rows `n`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.ir.graph import Op, Ref, Tensor
from weft.ir.ranges import whole
from weft.ops.arguments import call, call_with, operand
from weft.ops.build import (
    OpView,
    RuleOf,
    broadcast,
    broadcasting,
    fixed_dims,
    groups,
    is_empty,
    named,
    numbered_dims,
    rules_of,
    when_cut,
)
from weft.ops.rule import Call, CellView, Dims, Local, Rule, fixed, names_of
from weft.runtime.operators.algorithms import Exchange

NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for `reduction`."""
WORDS = ("none", "mean", "sum")
"""What the runtime's functions, and so the text of programs, say for them."""

_POINTWISE = """
mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss margin_ranking_loss hinge_embedding_loss poisson_nll_loss
binary_cross_entropy binary_cross_entropy_with_logits kl_div
"""
_OWN_COUNT = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")
"""Losses whose gradients torch divides by the size of one operand."""


def cross_entropy(it: OpView) -> Rule:
    """Class indices or, if the target has the shape of the scores, class probabilities."""
    return _classified(it, soft=it.shapes[1] == it.shape, normalised=False)


def nll_loss(it: OpView) -> Rule:
    """As cross entropy, of log-probabilities."""
    return _classified(it, soft=False, normalised=True)


def _classified(it: OpView, *, soft: bool, normalised: bool) -> Rule:
    sizes = it.shape
    classes = named("c", sizes[_class_dim(sizes)])
    rows = (named("n", sizes[0]), *numbered_dims(sizes[2:], "s")) if len(sizes) > 1 else ()
    dims = (*rows[:1], classes, *rows[1:])
    weight = operand(it.args["weight"])
    held: dict[int | None, Dims] = {0: dims, 1: dims if soft else rows, weight: (classes,)}
    reduction = int(it.args["reduction"])
    names = names_of(rows)
    counted = reduction == MEAN and not soft
    # the gradient of the weights in the denominator would have to be exchanged too
    frozen = (*names, "c") if weight is not None and it.reads[weight].needs_grad and not soft else ()
    exchanges = {"c": _class_exchange(it.args, normalised, soft)}
    if counted:
        exchanges |= dict.fromkeys(names, Exchange("partial", "partial", ("all_reduce",)))
    return it.rule(
        [held[i] for i in range(len(it.reads))],
        [rows if reduction == NONE else ()],
        summed=() if reduction == NONE or counted else names,
        frozen=frozen,
        algorithms={name: found for name, found in exchanges.items() if name not in frozen},
        local=_soft_local(it) if soft else _hard_local(it, names, normalised),
    )


def _class_exchange(args: Mapping[str, Any], normalised: bool, soft: bool) -> Exchange:
    """Largest score and sum of exponentials, then what each loss picks from its classes. None in backward."""
    weighted = args["weight"] is not None
    smoothed = args.get("label_smoothing", 0.0) > 0
    picks = 2 if soft else 1 + weighted + (1 + weighted) * smoothed
    return Exchange("copy", "copy", ("all_reduce",) * (picks + 2 * (not normalised)))


def _class_dim(sizes: tuple[int, ...]) -> int:
    return 0 if len(sizes) == 1 else 1


def _hard_local(it: OpView, rows: tuple[str, ...], normalised: bool) -> Local:
    args, sizes, at = it.args, it.shape, _class_dim(it.shape)

    def local(op: Op, cell: CellView) -> Call:
        classes = groups(cell, ("c",))
        counted = groups(cell, rows) if args["reduction"] == MEAN else ()
        if not classes and not counted and not is_empty(cell):
            return _whole(it, normalised)
        return call(
            "weft.cross_entropy",
            Ref("0"),
            Ref("1"),
            args["weight"],
            reduction=WORDS[args["reduction"]],
            ignore_index=int(args["ignore_index"]),
            label_smoothing=args.get("label_smoothing", 0.0),
            log_probabilities=normalised,
            ranges=cell.inputs[0][at] if classes else whole(sizes[at]),
            num_classes=sizes[at],
            rows=counted,
            classes=classes,
        )

    return local


def _whole(it: OpView, normalised: bool) -> Call:
    """The loss of whole rows, all of them here."""
    args = it.args
    plain = args["weight"] is None and args.get("label_smoothing", 0.0) == 0 and args["reduction"] != NONE
    if normalised or not plain or len(it.shape) != 2:
        return call_with(it.op)
    options = {"reduction": WORDS[args["reduction"]], "ignore_index": int(args["ignore_index"])}
    return call("weft.entropy", Ref("0"), Ref("1"), **options)


def _soft_local(it: OpView) -> Local:
    args, num_classes = it.args, it.shape[_class_dim(it.shape)]

    def local(op: Op, cell: CellView) -> Call:
        if not cell.cut:
            return call_with(op)
        return call(
            "weft.soft_cross_entropy",
            Ref("0"),
            Ref("1"),
            args["weight"],
            reduction=WORDS[args["reduction"]],
            label_smoothing=args["label_smoothing"],
            num_classes=num_classes,
            count=math.prod(it.shape) // num_classes,
            classes=groups(cell, ("c",)),
        )

    return local


def pointwise_loss(it: OpView) -> Rule:
    """A loss of each element, then `reduction`."""
    shape = broadcast(it.shapes)
    dims = numbered_dims(shape)
    reduction = int(it.args["reduction"])
    if reduction == MEAN and it.kind in _OWN_COUNT and it.shape != it.shapes[1]:
        raise it.error(
            f"{it.op.target} of operands that broadcast: torch divides each gradient by the size of that operand alone",
            "expand the operands first, as torch.nn.functional does",
        )
    names = () if reduction == NONE else names_of(dims)
    inputs, local = broadcasting(dims, shape, it.reads), _share_of_mean(it, names, math.prod(shape))
    return it.rule(inputs, [dims if reduction == NONE else ()], summed=names, local=local)


def _share_of_mean(it: OpView, names: tuple[str, ...], count: int) -> Local | None:
    """Of a mean over `count` losses each part leaves the share of its own; any other reduction is the op's own call."""
    if it.args["reduction"] != MEAN:
        return None
    return when_cut(names, _loss_part(it, count), talks=False)


def _loss_part(it: OpView, count: int) -> Call:
    summed = call_with(it.op, reduction=SUM)
    return call("weft.loss_part", it.op.target, *summed.args, **dict(summed.kwargs), count=count)


def row_loss(it: OpView) -> Rule:
    """Operands of several dims have rows first, those of one dim hold a number per row; class weights stay whole."""
    weight = operand(it.args.get("weight"))
    own = [sizes for i, sizes in enumerate(it.shapes) if i != weight]
    rows = max(map(len, own)) > 1
    first = max(sizes[0] for sizes in own if sizes) if rows else 1
    n = named("n", first)
    # distances are taken along the last dim, and every other index has a loss of its own
    count = math.prod(broadcast(own)[:-1]) if it.kind == "triplet_margin_loss" else first

    def dims(position: int, tensor: Tensor) -> Dims:
        if not rows or position == weight or not tensor.sizes or tensor.sizes[0] != first:
            return fixed_dims(tensor)[0]
        return (n, *map(fixed, tensor.sizes[1:]))

    out: Dims = (n, *map(fixed, it.result[1:])) if it.result else ()
    summed = names_of([n]) if it.args["reduction"] != NONE else ()
    inputs = [dims(i, tensor) for i, tensor in enumerate(it.reads)]
    return it.rule(inputs, [out], summed=summed, local=_share_of_mean(it, summed, count) or _sum_of_none(it))


def _sum_of_none(it: OpView) -> Local | None:
    """Torch's kernels leave the sum over no rows as they find it in memory: a function of the runtime gives 0."""
    return when_cut((), _loss_part(it, 1), talks=False, empty=True) if it.args["reduction"] == SUM else None


def ctc_loss(it: OpView) -> Rule:
    """`t n c, n s, n, n -> n`: alignments run over all steps and classes. Targets laid end to end tie rows together."""
    args, reduction, scores = it.args, int(it.args["reduction"]), it.shape
    if len(scores) != 3 or len(it.shapes[1]) != 2:
        raise it.error(
            f"{it.op.target} with targets laid end to end has no rule",
            "give targets of two dims, one row for each sequence, or keep the op copied",
        )

    def local(op: Op, cell: CellView) -> Call:
        if "n" not in cell.cut:
            return call_with(op)
        own = [i for start, stop in cell.inputs[0][1] for i in range(start, stop)]
        sizes = {
            name: args[name] if isinstance(args[name], Ref) else tuple(args[name][i] for i in own)
            for name in ("input_lengths", "target_lengths")
        }
        if reduction != MEAN and not is_empty(cell):
            return call_with(op, **sizes)
        options = {"blank": args["blank"], "zero_infinity": args["zero_infinity"]}
        tensors = (Ref("0"), Ref("1"), *sizes.values())
        return call("weft.ctc_part", *tensors, reduction=WORDS[reduction], count=scores[1], **options)

    lengths = ", n" * (len(it.reads) - 2)
    left, right = ("n", "n") if reduction == NONE else ("n+", "")
    return it.text(f"_ {left} _, n _{lengths} -> {right}", local=local)


RULES: Mapping[str, RuleOf] = {
    "aten.cross_entropy_loss": cross_entropy,
    **rules_of(nll_loss, "nll_loss nll_loss2d nll_loss_nd"),
    **rules_of(pointwise_loss, _POINTWISE),
    **rules_of(row_loss, "cosine_embedding_loss multi_margin_loss multilabel_margin_loss triplet_margin_loss"),
    "aten.ctc_loss": ctc_loss,
}
"""Rules by operator."""

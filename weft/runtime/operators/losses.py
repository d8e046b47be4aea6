"""Losses over cut rows and cut classes.

In: the local parts, the communicators along the cut row and class dims, and which classes are local. Out: with the
classes cut, the complete value on every cell, whose complete gradient comes back there; with the rows cut and a
reduction, an addend: the local sum over the whole denominator. Parts may be empty in rows and in classes.

`entropy` is cross entropy over whole rows, in one tensor of the size of the scores. Torch keeps the log-probabilities,
and backward makes two more tensors of their size; here backward turns what was kept into the gradient, and if nobody
reads the scores any more they are turned into the log-probabilities. Promised: a second backward through one loss
raises; scores of low precision, and anything but a matrix, take torch's own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from weft.runtime.comm import Comms, reduce, sum_to_copy, wide
from weft.runtime.layout.indices import Intervals, locate
from weft.runtime.operators.reductions import scores_and_total
from weft.runtime.weights.gradient import is_retained

MEAN, SUM = "mean", "sum"
NUMBERS = {"none": 0, MEAN: 1, SUM: 2}
"""ATen's numbers for `reduction`."""
PLAIN = (torch.float32, torch.float64)
"""Dtypes in which a sum over many rows keeps its precision."""


def loss_part(target: str, *args: Any, count: int, **kwargs: Any) -> Tensor:
    """A loss that sums over elements, as the share of a mean over `count` of them: an addend."""
    _, name, overload = target.split(".")
    loss: Tensor = getattr(getattr(torch.ops.aten, name), overload)(*args, **kwargs)
    if not args[0].numel():
        # some kernels leave the sum over no rows as they find it in memory
        loss = loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0)
    return loss / count


def entropy(
    scores: Tensor, target: Tensor, *, reduction: str = MEAN, ignore_index: int = -100, reuse: bool = False
) -> Tensor:
    """Cross entropy with class indices.

    Args:
        reuse: nobody else reads the scores, and backward of what made them does not either: they may be written over.
    """
    if scores.dim() != 2 or scores.dtype not in PLAIN or reduction not in (MEAN, SUM):
        return F.cross_entropy(scores, target, reduction=reduction, ignore_index=ignore_index)
    found: Tensor = _Entropy.apply(scores, target, reduction, ignore_index, reuse and scores.is_contiguous())
    return found


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, reduction: str, ignore_index: int, reuse: bool) -> Tensor:
        # autograd does not see the writing, but counts it: whoever did keep the scores for backward is told
        kept = torch.log_softmax(scores, 1, out=scores.detach()) if reuse else torch.log_softmax(scores, 1)
        loss: Tensor
        loss, weight = torch.ops.aten.nll_loss_forward.default(kept, target, None, NUMBERS[reduction], ignore_index)
        ctx.save_for_backward(kept, target, weight)
        ctx.mean, ctx.ignore_index, ctx.spent = reduction == MEAN, ignore_index, False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.spent:
            raise RuntimeError("backward goes through a loss a second time, and the first has used up what it kept")
        kept, target, weight = ctx.saved_tensors
        if is_retained():
            kept = kept.clone()
        else:
            ctx.spent = True
        valid = target != ctx.ignore_index
        share = torch.where(valid, gradient / weight if ctx.mean else gradient, 0).unsqueeze(1)
        kept.exp_().mul_(share)
        kept.scatter_add_(1, torch.where(valid, target, 0).unsqueeze(1), -share)
        return kept, None, None, None, None


def cross_entropy(  # noqa: PLR0913  the operator has as many
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float = 0.0,
    log_probabilities: bool = False,
    ranges: Intervals,
    num_classes: int,
    rows: Comms = (),
    classes: Comms = (),
    reuse: bool = False,
) -> Tensor:
    """Cross entropy with class indices. `log_probabilities`: x is normalised already (the nll loss). `reuse`: x may be
    written over."""
    valid = target != ignore_index
    known = ((target >= 0) & (target < num_classes)) | ~valid
    _check_known(known, target, f"neither a class (0 to {num_classes - 1}) nor the ignored index ({ignore_index})")
    if not classes and tuple(map(tuple, ranges)) == ((0, num_classes),) and x.dtype in PLAIN:
        part = SUM if reduction == MEAN else reduction
        if log_probabilities:
            loss: Tensor = torch.ops.aten.nll_loss_nd.default(x, target, weight, NUMBERS[part], ignore_index)
        elif weight is None and label_smoothing == 0 and part == SUM:
            loss = entropy(x, target, reduction=part, ignore_index=ignore_index, reuse=reuse)
        else:
            loss = torch.ops.aten.cross_entropy_loss.default(
                x, target, weight, NUMBERS[part], ignore_index, label_smoothing
            )
        return loss / _denominator(x.dtype, target, weight, ignore_index, rows) if reduction == MEAN else loss
    class_dim = 0 if x.ndim == 1 else 1
    values = wide(x)
    plain = (values, values.new_zeros(()))
    scores, total = plain if log_probabilities else scores_and_total(values, class_dim, classes)
    positions, here = locate(target, ranges)
    here = here & valid
    share = _share(weight, positions, here, valid, scores, classes)
    loss = (total - sum_to_copy(_pick(scores, positions, here, class_dim), classes)) * share
    if label_smoothing > 0.0:
        smooth = _smooth(scores, total, weight, class_dim, num_classes, classes)
        loss = (1 - label_smoothing) * loss + label_smoothing / num_classes * smooth.masked_fill(~valid, 0)
    loss = loss.masked_fill(~valid, 0)
    return _reduced(loss, reduction, reduce(share.sum(), rows) if reduction == MEAN else 1).to(x.dtype)


def _check_known(known: Tensor, target: Tensor, what: str) -> None:
    """Each target is one that there is. The error is torch's on one device, which callers may expect."""
    if type(known) is not Tensor or known.device.type != "cpu" or torch._C._len_torch_dispatch_stack():
        torch._assert_async(known.all(), f"a target is {what}")
    elif not known.all():
        raise IndexError(f"target {target[~known][0].item()} is out of bounds: {what}")


def _denominator(dtype: torch.dtype, target: Tensor, weight: Tensor | None, ignore_index: int, rows: Comms) -> Tensor:
    """What a mean over all rows divides by."""
    valid = target != ignore_index
    share = valid if weight is None else torch.where(valid, weight.detach()[target.where(valid, 0)], 0)
    return reduce(share.sum(dtype=dtype), rows)


def _pick(scores: Tensor, positions: Tensor, here: Tensor, class_dim: int) -> Tensor:
    """The score of each row's target where this cell holds it, else zero."""
    if scores.shape[class_dim] == 0:
        return scores.sum(class_dim)
    picked = scores.gather(class_dim, positions.unsqueeze(class_dim)).squeeze(class_dim)
    return torch.where(here, picked, 0)


def _share(
    weight: Tensor | None, positions: Tensor, here: Tensor, valid: Tensor, scores: Tensor, classes: Comms
) -> Tensor:
    """The weight of each row: that of its target's class; zero if ignored."""
    if weight is None:
        return valid.to(scores.dtype)
    local = weight.detach().to(scores.dtype)
    found = torch.where(here, local[positions], 0) if len(local) else torch.zeros_like(positions, dtype=scores.dtype)
    return reduce(found, classes)


def _smooth(
    scores: Tensor, total: Tensor, weight: Tensor | None, class_dim: int, num_classes: int, classes: Comms
) -> Tensor:
    """Minus the (weighted) sum of all log-probabilities of each row."""
    if weight is None:
        return total * num_classes - sum_to_copy(scores.sum(class_dim), classes)
    spread = _by_class(weight.detach(), scores, class_dim).to(scores.dtype)
    return total * reduce(spread.sum(), classes) - sum_to_copy((scores * spread).sum(class_dim), classes)


def _by_class(weight: Tensor, scores: Tensor, class_dim: int) -> Tensor:
    """The weights of classes as they are broadcast over scores."""
    return weight.view(len(weight), *(1,) * (scores.ndim - class_dim - 1))


def soft_cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str,
    label_smoothing: float = 0.0,
    num_classes: int,
    count: int,
    classes: Comms = (),
) -> Tensor:
    """Cross entropy with class probabilities; the mean is over `count` rows, of which this cell may hold a part."""
    class_dim = 0 if x.ndim == 1 else 1
    scores, total = scores_and_total(wide(x), class_dim, classes)
    aim = target * (1 - label_smoothing) + label_smoothing / num_classes
    if weight is not None:
        aim = aim * _by_class(weight, x, class_dim)
    mass = sum_to_copy(aim.sum(class_dim), classes)
    loss = total * mass - sum_to_copy((scores * aim).sum(class_dim), classes)
    return _reduced(loss, reduction, count).to(x.dtype)


def ctc_part(
    scores: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    *,
    reduction: str,
    count: int,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The share of the rows held here, maybe none, in a ctc loss over `count` rows."""
    loss: Tensor
    if scores.shape[1]:
        loss = torch.ops.aten.ctc_loss(scores, targets, input_lengths, target_lengths, blank, 0, zero_infinity)
    else:
        loss = scores.sum((0, 2))
    if reduction == MEAN:
        steps = torch.as_tensor(target_lengths, device=scores.device).clamp(min=1).to(loss.dtype)
        loss = loss / steps
    return _reduced(loss, reduction, count)


def _reduced(loss: Tensor, reduction: str, count: int | Tensor) -> Tensor:
    """A loss by row, or its sum, which is divided by the number of rows for a mean."""
    if reduction == MEAN:
        return loss.sum() / count
    return loss.sum() if reduction == SUM else loss

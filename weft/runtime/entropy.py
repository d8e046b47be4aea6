"""Cross entropy over whole rows of classes, in one tensor of the size of the scores.

In: scores [rows, classes], the class of each row. Out: what `F.cross_entropy` gives. Torch keeps the log-probabilities,
and backward makes two more tensors of their size; here backward turns what was kept into the gradient, and if nobody
reads the scores any more they are turned into the log-probabilities. Promised: a second backward through one loss
raises; scores of low precision, and anything but a matrix, take torch's own way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

MEAN, SUM = 1, 2
"""ATen's numbers for `reduction`."""
NAMES = {0: "none", MEAN: "mean", SUM: "sum"}
PLAIN = (torch.float32, torch.float64)
"""Dtypes in which a sum over many rows keeps its precision."""


def entropy(
    scores: Tensor, target: Tensor, *, reduction: int = MEAN, ignore_index: int = -100, reuse: bool = False
) -> Tensor:
    """Cross entropy with class indices.

    Args:
        reuse: nobody else reads the scores, and backward of what made them does not either: they may be written over.
    """
    if scores.dim() != 2 or scores.dtype not in PLAIN or reduction not in (MEAN, SUM):
        return F.cross_entropy(scores, target, reduction=NAMES[reduction], ignore_index=ignore_index)
    found: Tensor = _Entropy.apply(scores, target, reduction, ignore_index, reuse and scores.is_contiguous())
    return found


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, reduction: int, ignore_index: int, reuse: bool) -> Tensor:
        # autograd does not see the writing, but counts it: whoever did keep the scores for backward is told
        kept = torch.log_softmax(scores, 1, out=scores.detach()) if reuse else torch.log_softmax(scores, 1)
        loss: Tensor
        loss, weight = torch.ops.aten.nll_loss_forward.default(kept, target, None, reduction, ignore_index)
        ctx.save_for_backward(kept, target, weight)
        ctx.mean, ctx.ignore_index, ctx.spent = reduction == MEAN, ignore_index, False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.spent:
            raise RuntimeError("backward goes through a loss a second time, and the first has used up what it kept")
        ctx.spent = True
        kept, target, weight = ctx.saved_tensors
        valid = target != ctx.ignore_index
        share = torch.where(valid, gradient / weight if ctx.mean else gradient, 0).unsqueeze(1)
        kept.exp_().mul_(share)
        kept.scatter_add_(1, torch.where(valid, target, 0).unsqueeze(1), -share)
        return kept, None, None, None, None

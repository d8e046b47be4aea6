"""Reduction: how the losses of micro-batches become that of a step.

    "mean"        by rows: sum(rows * loss) / sum(rows)
    "sum"         sum(loss)
    a function    called with each micro-batch as the model is, gives its weight: sum(weight * loss) / sum(weight)

In: the micro-batches of one replica, and what the other replicas have. Out: what each micro-batch's loss counts, in the
loss of the replica and in gradients that are averaged over replicas. Promised: the same numbers as one device with the
micro-batches of all replicas; what weighs nothing counts nothing, whatever its loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from weft.runtime.program.calling import Arguments

Weigh = Callable[..., Any]
"""What a micro-batch weighs: a number, or a tensor of one."""
How = Literal["mean", "sum"] | Weigh


class BadReduction(ValueError):  # noqa: N818 - says what is wrong
    """No reduction, or one that gives no weight."""


@dataclass(frozen=True)
class Reduction:
    """See the head of this file."""

    how: How = "mean"

    def __post_init__(self) -> None:
        if not callable(self.how) and self.how not in ("mean", "sum"):
            raise BadReduction(f"{self.how!r} is no reduction of losses")

    @property
    def sums(self) -> bool:
        return self.how == "sum"

    def weights(self, micros: Sequence[Arguments], rows: Sequence[int]) -> list[float]:
        """What each micro-batch weighs."""
        if callable(self.how):
            return [_number(self.how(*args, **kwargs)) for args, kwargs in micros]
        return [1.0 if self.sums else float(count) for count in rows]

    def shares(self, weights: Sequence[float]) -> list[float]:
        """What each micro-batch counts in the loss of its replica."""
        return [1.0] * len(weights) if self.sums else _divided(weights, sum(weights))

    def counts(self, weights: Sequence[float], totals: Sequence[float]) -> list[float]:
        """What each micro-batch's gradient counts, before gradients are averaged over replicas.

        Args:
            totals: the weights of each replica, added up.
        """
        if self.sums:
            return [float(len(totals))] * len(weights)
        return _divided([weight * len(totals) for weight in weights], sum(totals))


def times(loss: Tensor, factor: float | Tensor) -> Tensor:
    """A loss so many times. A tensor is not looked at."""
    return loss if not isinstance(factor, Tensor) and factor == 1 else loss * factor


def reduced(losses: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The loss of some micro-batches; one that counts nothing is left out, also if it is not a number."""
    found = [times(loss, share) for loss, share in zip(losses, shares, strict=True) if share]
    if not found:
        return losses[0] * 0
    total = found[0].clone()
    for loss in found[1:]:
        total = total + loss
    return total


@dataclass(frozen=True)
class PerToken:
    """Counts the targets of a micro-batch that are not ignored."""

    targets: str | int
    ignore_index: int
    shift: int

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        found = kwargs.get(self.targets) if isinstance(self.targets, str) else None
        if isinstance(self.targets, int) and self.targets < len(args):
            found = args[self.targets]
        if not isinstance(found, Tensor):
            given = [*(str(at) for at in range(len(args))), *kwargs]
            raise BadReduction(f"per_token({self.targets!r}): the batch has no such tensor; it has {', '.join(given)}")
        counted = found[:, self.shift :] if self.shift else found
        return int((counted != self.ignore_index).sum())


def per_token(targets: str | int, *, ignore_index: int = -100, shift: int = 0) -> Weigh:
    """A reduction by which every token counts alike: `parallelize(..., reduction=per_token("labels"))`.

    Each micro-batch's loss is to be the mean over its own tokens.

    Args:
        targets: the argument of the forward that holds them: its name if batches are dicts, its position if tuples.
        ignore_index: targets that the loss leaves out.
        shift: columns at the start of each row that are no targets: 1 for a model that shifts its labels itself.
    """
    return PerToken(targets, ignore_index, shift)


def _divided(weights: Sequence[float], total: float) -> list[float]:
    # as of a mean over nothing
    return [weight / total if total else math.nan for weight in weights]


def _number(weight: Any) -> float:
    try:
        found = float(weight)
    except (TypeError, ValueError):
        raise BadReduction(f"a micro-batch weighs {weight!r}, which is no number") from None
    if not math.isfinite(found) or found < 0:
        raise BadReduction(f"a micro-batch weighs {found}")
    return found

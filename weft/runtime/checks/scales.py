"""Scales: by what factor the gradients of a rank were scaled since they were complete.

In: the rank's trained parameters, at the end of backward and again before the update. Out: whether gradients were
written to in between (by their versions), and if so the factor between a few elements then and now: nan if
others were written to and none of these, if they are all zero, or if no single factor explains the change, as of one
that clamps each element.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NUM_TENSORS, NUM_ELEMENTS = 4, 32
"""How much is remembered: elements of so many gradients."""
DEPTH = 12
"""Frames between a hook and who called step()."""


@dataclass(frozen=True)
class _Then:
    """A gradient as it was. Its memory is not held: it may be freed before the next one comes."""

    parameter: nn.Parameter
    state: tuple[int, int]
    first: int
    """Of its elements, among those that are remembered."""


@dataclass(frozen=True)
class _Other:
    """A gradient of which others have the elements, as it was.

    Args:
        gradient: itself, if it is empty: it takes no memory, and another one in its place looks the same.
    """

    parameter: nn.Parameter
    state: tuple[int, int]
    gradient: Tensor | None

    @property
    def is_written(self) -> bool:
        now = self.parameter.grad
        is_other = self.gradient is not None and self.gradient is not now
        return now is not None and (is_other or _state(now) != self.state)


class Scales:
    """What is remembered of one rank's gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = sorted(parameters, key=lambda one: -one.numel())[:NUM_TENSORS]
        self.others: Sequence[nn.Parameter] = ()
        """Further ones, of which other ranks remember elements: looked at for whether they were written to."""
        self._others: list[_Other] = []
        self._then: list[_Then] = []
        self._elements = torch.empty(0)
        """Of all that are remembered, one after the other."""

    @property
    def remembered(self) -> list[nn.Parameter]:
        """Of which elements are looked at."""
        return [one for one in self._parameters if one.numel()]

    @property
    def tolerance(self) -> float:
        """Relative, of a factor."""
        return 4 * max((torch.finfo(one.dtype).eps for one in self._parameters if one.is_floating_point()), default=0.0)

    @torch.no_grad()
    def remember(self) -> None:
        """Gradients are complete now."""
        self._then, rows, length = [], list[Tensor](), 0
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.numel() and gradient.is_floating_point():
                self._then.append(_Then(parameter, _state(gradient), length))
                rows.append(_row(gradient))
                length += len(rows[-1])
        held = [(one, one.grad) for one in self.others if one.grad is not None]
        self._others = [_Other(one, _state(grad), None if grad.numel() else grad) for one, grad in held]
        # always a copy
        self._elements = torch.cat(rows) if rows else torch.empty(0)

    @property
    def written(self) -> bool:
        """True if one of them was written to since, or another was put in its place. Empty ones count: a rank that has
        no elements of a gradient does with it what the others do."""
        return self._has_scaled or any(one.is_written for one in self._others)

    @property
    def _has_scaled(self) -> bool:
        """It was one of those of which elements are remembered."""
        return any(one.parameter.grad is not None and _state(one.parameter.grad) != one.state for one in self._then)

    @torch.no_grad()
    def factor(self) -> float:
        """By what they were multiplied; nan if that cannot be said."""
        found = [torch.zeros(0, dtype=torch.float64)]
        for one in self._then if self._has_scaled or not self.written else ():
            now = one.parameter.grad
            if now is not None and now.numel():
                row = _row(now)
                then = self._elements[one.first : one.first + len(row)]
                usable = (then != 0) & torch.isfinite(then)
                found.append((row[usable].double() / then[usable].double()).cpu())
        ratios = torch.cat(found)
        if not ratios.numel() or not bool(torch.isfinite(ratios).all()):
            return math.nan
        low, high = float(ratios.min()), float(ratios.max())
        return low if agreed([low, high], self.tolerance) else math.nan


def agreed(factors: Sequence[float], tolerance: float) -> bool:
    """True if those that are known are one, but for rounding."""
    known = [one for one in factors if not math.isnan(one)]
    if not known:
        return True
    return max(known) - min(known) <= tolerance * max(map(abs, known))


def under_plain_scaler() -> bool:
    """True inside the step() of a GradScaler that knows nothing of other ranks."""
    plain, frame = torch.amp.GradScaler.step.__code__, sys._getframe(1)
    for _ in range(DEPTH):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code is plain:
            scaler = frame.f_locals["self"]
            return bool(scaler._enabled) and type(scaler)._unscale_grads_ is torch.amp.GradScaler._unscale_grads_
    return False


def _state(gradient: Tensor) -> tuple[int, int]:
    return gradient.data_ptr(), gradient._version


def _row(gradient: Tensor) -> Tensor:
    """The first elements, without a copy."""
    if gradient.is_contiguous():
        return gradient.as_strided((min(gradient.shape[-1] if gradient.dim() else 1, NUM_ELEMENTS),), (1,))
    while gradient.dim() > 1:
        gradient = gradient[0]
    return gradient.reshape(-1)[:NUM_ELEMENTS]

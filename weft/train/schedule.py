"""Learning-rate schedules: a factor for every step, a pure function of its number, so that a resumed run goes on alike.

warm-up   rises evenly to 1 over the first steps
constant  1            linear  falls evenly to 0            cosine  falls to 0 along half a cosine
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from weft.errors import RunError

SHAPES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes.

    >>> [Schedule("linear", warmup=2, steps=6).factor(step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    shape: str = "constant"
    warmup: int = 0
    steps: int = 1

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise RunError(f"no schedule {self.shape!r}", remedy=f"one of {', '.join(SHAPES)}")
        if self.warmup < 0 or self.warmup > self.steps:
            raise RunError(f"{self.warmup} steps of warm-up in {self.steps} steps", remedy="a smaller --warmup")

    def __str__(self) -> str:
        """In words; a rate that never changes needs no number of steps.

        >>> str(Schedule()), str(Schedule("cosine", 3, 12))
        ('constant', 'cosine over 12 steps, 3 of them warm-up')
        """
        if self.shape == "constant":
            return f"constant after {self.warmup} steps of warm-up" if self.warmup else "constant"
        return f"{self.shape} over {self.steps} steps, {self.warmup} of them warm-up"

    def factor(self, step: int) -> float:
        """For the step of that number, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        if self.shape == "linear":
            return 1.0 - done
        return (1.0 + math.cos(math.pi * done)) / 2 if self.shape == "cosine" else 1.0


class Rates:
    """Sets the learning rate of an optimizer before each step."""

    def __init__(self, optimizer: Any, schedule: Schedule) -> None:
        self._groups, self._schedule = optimizer.param_groups, schedule
        self._base = [float(group["lr"]) if "lr" in group else None for group in self._groups]
        self._plain = schedule.shape == "constant" and not schedule.warmup

    def begin(self, step: int) -> float:
        """Set it; the rate of the first group."""
        for group, base in zip(self._groups, self._base, strict=True):
            if base is not None and not self._plain:
                group["lr"] = base * self._schedule.factor(step)
        return float(self._groups[0].get("lr", math.nan)) if self._groups else math.nan

"""Where to read a loss is to wait for a device, it is read when the next step was issued."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from weft.errors import RunError
from weft.train.loop import Order, Run
from weft.train.settings import Settings


class Scripted(Run):
    """Steps with these losses; what happens is written down."""

    _lags = True  # type: ignore[assignment]

    def __init__(self, losses: list[float], **settings: Any) -> None:
        self._settings, self._losses, self.said = Settings(steps=len(losses), **settings), losses, list[str]()
        self._order, self._evaluations = Order("", {}, self._settings), []
        self._source = self._module = self  # type: ignore[assignment]

    replica, num_replicas = 0, 1

    def batches(self, *where: int) -> Any:
        return iter(range(len(self._losses)))

    def _step(self, step: int, batch: Any) -> Any:
        self.said.append(f"step {step}")
        return torch.tensor(self._losses[step]), {"train/norm": torch.tensor(1.0)}

    def _between(self, done: int, shown: Any) -> None:
        if self._pauses(done):
            self.said.append(f"pause after {done}")

    def step(self, step: int, loss: float, numbers: dict[str, float]) -> None:
        assert numbers == {"train/norm": 1.0}
        self.said.append(f"loss {step}")

    @property
    def program(self) -> Any:
        return self

    transport = device = property(lambda self: self)
    type = "cpu"


def test_losses_are_read_one_step_late_and_before_a_pause() -> None:
    run = Scripted([5.0, 4.0, 3.0, 2.0, 1.0], eval_every=3)
    assert run.train(run).losses == (5.0, 4.0, 3.0, 2.0, 1.0)  # type: ignore[arg-type]
    assert ", ".join(run.said) == (
        "step 0, loss 0, step 1, step 2, loss 1, loss 2, pause after 3, step 3, step 4, loss 3, loss 4, pause after 5"
    )


def test_a_loss_that_is_not_finite_is_told_with_its_step() -> None:
    run = Scripted([5.0, math.nan, 3.0, 2.0])
    with pytest.raises(RunError, match="the loss is nan in step 1"):
        run.train(run)  # type: ignore[arg-type]
    assert run.said == ["step 0", "loss 0", "step 1", "step 2"]

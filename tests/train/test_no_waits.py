"""Where to read a number is to wait for a device: what is refused, and when, if the host looks in some steps only."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import weft
from tests.parts import parts
from tests.train.eager import mlp
from weft.errors import RunError
from weft.runtime.checks.replicated import is_due
from weft.runtime.training.step import call


def parallel_mlp() -> tuple[Any, Any]:
    model, example = mlp()
    return weft.parallelize(model, example, "tp=2", emulate=True, cache=None), example


class Rare(weft.GradScaler):
    """Looks as it does on a device."""

    _looks = property(lambda self: is_due(self._num_updates))  # type: ignore[assignment]


def test_scales_of_gradients_are_compared_in_some_steps_only() -> None:
    parallel, example = parallel_mlp()
    parallel.guard.waits = True
    optimizer, refused = torch.optim.SGD(parallel.parameters(), lr=0.0), []
    for step in range(10):
        optimizer.zero_grad()
        call(parallel, example).backward()
        for _, one in parallel.guard.ranks[0].trained:
            one.grad.as_subclass(torch.Tensor).mul_(0.5)
        try:
            optimizer.step()
        except RunError as error:
            assert "scaled by different factors" in str(error)
            refused.append(step)
    assert refused == [0, 1, 2, 4, 8]


def test_a_scale_that_overflows_for_ever_is_found() -> None:
    parallel, _ = parallel_mlp()
    scaler, optimizer = Rare("cpu"), torch.optim.SGD(parallel.parameters(), lr=0.1)
    held, made = list(parallel.parameters()), 0
    with pytest.raises(RunError, match="not finite in 64 steps"):
        for _ in range(70):
            for one in held:
                one.grad = torch.full_like(one, math.inf)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            made += 1
    assert made == 64


def test_what_cannot_be_scaled_back_updates_nothing_until_it_is_refused() -> None:
    parallel, example = parallel_mlp()
    scaler, optimizer = Rare("cpu", init_scale=1.0), torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(3):
        parallel.train_step(example, optimizer, scaler=scaler)
    # number 3 is none in which the host looks
    scaler._scale.fill_(0.0)  # type: ignore[union-attr]
    before, made = parts([one.clone() for one in parallel.parameters()]), 0
    with pytest.raises(RunError, match="cannot be scaled back"):
        for _ in range(5):
            parallel.train_step(example, optimizer, scaler=scaler)
            made += 1
    assert made == 1
    assert all(torch.equal(parts(one), other) for one, other in zip(parallel.parameters(), before, strict=True))


def test_a_scaler_that_is_not_enabled_does_nothing() -> None:
    parallel, example = parallel_mlp()
    scaler, optimizer = weft.GradScaler("cpu", enabled=False), torch.optim.SGD(parallel.parameters(), lr=0.1)
    before = parts([one.clone() for one in parallel.parameters()])
    parallel.train_step(example, optimizer, scaler=scaler)
    assert any(not torch.equal(parts(one), other) for one, other in zip(parallel.parameters(), before, strict=True))

"""One optimizer step of a parallel module, or of any module whose call gives a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor


class Optimizer(Protocol):
    """What a step needs of an optimizer."""

    def step(self) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


def call(module: Callable[..., Any], batch: Any) -> Any:
    """Call with a batch: a tuple of positional arguments, a dict of keyword arguments, or the only argument."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)


def loss_of(module: Callable[..., Any], batch: Any) -> Tensor:
    """The loss of a batch."""
    loss = call(module, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError("train_step() needs a loss, and this module returns none: make one of what it returns")
    return loss


def train_step(module: Callable[..., Any], batch: Any, optimizer: Optimizer) -> Tensor:
    """Forward, backward, update; the loss before the update. Gradients stay to be looked at until the next step."""
    optimizer.zero_grad(set_to_none=True)
    loss = loss_of(module, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()

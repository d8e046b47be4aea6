"""One optimizer step of a parallel module, and how a batch becomes arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Optimizer(Protocol):
    """What a step needs of an optimizer."""

    def step(self) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


Optimizers = Optimizer | Sequence[Optimizer]
"""One, or several that update parameters of their own."""


class Scaler(Protocol):
    """What a step needs of a GradScaler."""

    def scale(self, outputs: Tensor) -> Any: ...

    def unscale_(self, optimizer: Any) -> None: ...

    def step(self, optimizer: Any) -> Any: ...

    def update(self) -> None: ...


Prepare = Callable[[], Any]
"""What is done with complete gradients before the update."""


def all_of(optimizer: Optimizers) -> Sequence[Optimizer]:
    """The optimizers, one by one."""
    return optimizer if isinstance(optimizer, Sequence) else (optimizer,)


def call(module: Callable[..., Any], batch: Any) -> Any:
    """Call with a batch: a tuple of positional arguments, a dict of keyword arguments, or the only argument."""
    args, kwargs = arguments_of(batch)
    return module(*args, **kwargs)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that a batch is."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def loss_of(module: Callable[..., Any], batch: Any) -> Tensor:
    """The loss of a batch."""
    loss = call(module, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError("train_step() needs a loss, and this module returns none: make one of what it returns")
    return loss


def step_of(
    forward_backward: Callable[[Any, float], Tensor],
    batch: Any,
    optimizer: Optimizers,
    prepare: Prepare | None = None,
    scaler: Scaler | None = None,
) -> Tensor:
    """Gradients, update; the loss before it. Gradients stay to be looked at until the next step."""
    for one in all_of(optimizer):
        one.zero_grad(set_to_none=True)
    loss = forward_backward(batch, 1.0 if scaler is None else float(scaler.scale(torch.ones(()))))
    if scaler is not None:
        if hasattr(scaler, "saw"):
            scaler.saw(loss)  # one of ours, which ends what does not get better
        for one in all_of(optimizer):
            scaler.unscale_(one)
    if prepare is not None:
        prepare()
    for one in all_of(optimizer):
        one.step() if scaler is None else scaler.step(one)
    if scaler is not None:
        scaler.update()
    return loss

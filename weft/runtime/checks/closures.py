"""Closures of optimizers: `optimizer.step(closure)` on several ranks.

In: an optimizer and the arguments of its step. Out: other arguments, if there is a closure: it has been run, before
the gradients are looked at, and gives the loss that it gave. Refused: an optimizer that runs it inside its update.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.errors import Refuse

CLOSURE = (
    "{0} runs the model inside its update, where and as often as it likes: ranks would not do so together",
    "one of torch.optim that runs it once, before the update: AdamW, SGD, ...; or, if it needs no closure, call "
    "backward() before step()",
)
Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a step."""


def run_closure(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], refuse: Refuse
) -> Given | None:
    """What torch's own optimizers run first is run here: the gradients that it makes are looked at as any others."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None
    if type(optimizer).step.__module__.split(".")[:2] != ["torch", "optim"] or isinstance(optimizer, torch.optim.LBFGS):
        what, instead = CLOSURE
        raise refuse(what.format(type(optimizer).__name__), instead)
    with torch.enable_grad():
        loss = closure()
    return args[:1], {**kwargs, "closure": lambda: loss}

"""Settings of optimizers: one number for all that an optimizer was set to in the steps that it has made.

In: an optimizer before its step. Out: for each parameter of its groups a number, which is the same on all ranks whose
optimizers were set alike in every step (learning rate, weight decay, betas, ...). Ranks compare it now and then
(`replicated.py`): a rank with a schedule of its own would update its shards by itself otherwise.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

NAME = "_weft_settings"
"""The attribute of optimizers: a number for each group."""
PLAIN = (bool, int, float, complex, str, tuple, type(None))


def note_settings(optimizer: torch.optim.Optimizer) -> None:
    """A step is about to be made with the settings that are there now."""
    known = vars(optimizer).setdefault(NAME, [])
    known.extend([0] * (len(optimizer.param_groups) - len(known)))
    for at, group in enumerate(optimizer.param_groups):
        told = [(name, _told(value)) for name, value in group.items() if name != "params"]
        known[at] = zlib.crc32(repr(told).encode(), known[at])


def noted(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, int]:
    """The number of each parameter that is updated, by its identity."""
    found: dict[int, int] = {}
    for optimizer in optimizers:
        for number, group in zip(vars(optimizer).get(NAME, ()), optimizer.param_groups, strict=False):
            for one in group["params"]:
                found[id(one)] = found.get(id(one), 0) + number
    return found


def _told(value: Any) -> Any:
    """What is compared of a setting. A number on a device is not: to look at it takes time."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return value if isinstance(value, PLAIN) else None

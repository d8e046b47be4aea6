"""Settings of optimizers: one number for all that an optimizer was set to in the steps that it has made.

In: an optimizer before its step. Out: for each parameter of its groups a number, which is the same on all ranks whose
optimizers were set alike in every step (learning rate, weight decay, betas, ...). Ranks compare it now and then
(`replicated.py`): a rank with a schedule of its own would update its shards by itself otherwise.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

NAME = "_weft_settings"
"""The attribute of optimizers."""
PLAIN = (bool, int, float, complex, str, tuple, type(None))


def note_settings(optimizer: torch.optim.Optimizer) -> None:
    """A step is about to be made with the settings that are there now."""
    known = vars(optimizer).setdefault(NAME, [])
    known.extend(_Group() for _ in optimizer.param_groups[len(known) :])
    for one, group in zip(known, optimizer.param_groups, strict=False):
        one.note(group)


def noted(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, int]:
    """The number of each parameter that is updated, by its identity."""
    found: dict[int, int] = {}
    for optimizer in optimizers:
        for known, group in zip(vars(optimizer).get(NAME, ()), optimizer.param_groups, strict=False):
            for one in group["params"]:
                found[id(one)] = found.get(id(one), 0) + known.number
    return found


class _Group:
    """What a group of parameters was set to: `number` is of all settings, and of the steps in which they changed."""

    def __init__(self) -> None:
        self.number = self._num_steps = 0
        self._last: tuple[Any, ...] = ()
        self._has_tensors = False

    def note(self, group: Mapping[str, Any]) -> None:
        self._num_steps += 1
        now = tuple(group.values())
        # hardly ever others than in the step before; a tensor may be the same one, with another value
        if self._has_tensors or now != self._last:
            self._last, self._has_tensors = now, any(isinstance(value, Tensor) for value in now)
            told = [(name, _told(value)) for name, value in group.items() if name != "params"]
            self.number = zlib.crc32(repr((self._num_steps, told)).encode(), self.number)

    def __reduce__(self) -> tuple[type[_Group], tuple[()]]:
        # saved or copied with its optimizer it says nothing
        return _Group, ()


def _told(value: Any) -> Any:
    """What is compared of a setting. A number on a device is not: to look at it takes time."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return value if isinstance(value, PLAIN) else None

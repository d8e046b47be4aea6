"""Settings of optimizers: one number for all that an optimizer was set to in the steps that it has made.

In: an optimizer before its step. Out: for each parameter of its groups a number, which is the same on all ranks whose
optimizers were set alike in every step (learning rate, weight decay, betas, ...). Ranks compare it now and then
(`replicated.py`): a rank with a schedule of its own would update its shards by itself otherwise.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

NAME = "_weft_settings"
"""The attribute of optimizers."""
PLAIN = (bool, int, float, complex, str, tuple, type(None))


def settings_for(optimizer: torch.optim.Optimizer) -> Settings:
    """What is known of an optimizer's."""
    found: Settings = vars(optimizer).setdefault(NAME, Settings())
    return found


def noted(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, int]:
    """The number of each parameter that is updated, by its identity."""
    found: dict[int, int] = {}
    for optimizer in optimizers:
        for number, group in zip(settings_for(optimizer).numbers.values(), optimizer.param_groups, strict=False):
            for one in group["params"]:
                found[id(one)] = found.get(id(one), 0) + number
    return found


class Settings:
    """What the groups of an optimizer were set to: `numbers` are, for each, of all settings and of the steps in which
    they changed."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self._texts: dict[int, str] = {}
        self.num_steps = 0
        self.last: list[tuple[Any, ...]] = []
        """What they were set to in the last step; nothing where a tensor may hold another value by now."""

    def note(self, groups: Sequence[dict[str, Any]]) -> None:
        """A step is about to be made with other settings than the last one, as far as is known."""
        now = list(map(tuple, map(dict.values, groups)))
        # a tensor may be the same one, with another value
        self.last = [] if any(isinstance(value, Tensor) for group in now for value in group) else now
        for at, group in enumerate(groups):
            text = repr([(name, _told(value)) for name, value in group.items() if name != "params"])
            if text != self._texts.get(at):
                self._texts[at] = text
                self.numbers[at] = zlib.crc32(f"{self.num_steps} {text}".encode(), self.numbers.get(at, 0))

    def __reduce__(self) -> tuple[type[Settings], tuple[()]]:
        # saved or copied with its optimizer it says nothing
        return Settings, ()


def _told(value: Any) -> Any:
    """What is compared of a setting. A number on a device is not: to look at it takes time."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return value if isinstance(value, PLAIN) else None

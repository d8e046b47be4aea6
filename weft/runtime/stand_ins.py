"""Stand-ins: what a loaded program calls in place of some of torch's functions.

In: the names of a program's file. Out: the same names; where one is `torch` or `torch.nn.functional`, it is that module
with products that can write the gradients of their weights (`direct.py`). The text stays plain torch, and so does what
runs, unless somebody asks. One call costs less than to watch every function of a forward for the few that matter.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from weft.runtime import direct


class StandIn(ModuleType):
    """A module of which some functions are others."""

    def __init__(self, original: ModuleType, **others: Any) -> None:
        super().__init__(original.__name__, original.__doc__)
        self.__dict__.update(others, _original=original)

    def __getattr__(self, name: str) -> Any:
        # looked up every time: what somebody puts there later counts
        return getattr(self.__dict__["_original"], name)


def put_stand_ins(names: dict[str, Any]) -> None:
    """Let a program's names mean their stand-ins."""
    pairs = (
        (torch, StandIn(torch, addmm=direct.addmm)),
        (functional, StandIn(functional, linear=direct.linear, embedding=direct.embedding)),
    )
    for name, value in list(names.items()):
        for original, other in pairs:
            if value is original:
                names[name] = other

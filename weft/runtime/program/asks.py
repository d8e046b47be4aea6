"""Asks: what a forward asks about a call besides values: the grad mode, `requires_grad`, memory formats.

In: the line that asks, and the tensors of the example. Out: an Ask, with the answers that a program was made with. A
call with other answers is served by another program, or refused with that line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

GRAD_MODE, REQUIRES_GRAD, MEMORY_FORMAT = "grad mode", "requires_grad", "memory format"
FORMATS = {"channels_last": (torch.channels_last, 4), "channels_last_3d": (torch.channels_last_3d, 5)}


@dataclass(frozen=True)
class Ask:
    """A kind of question that forward asks.

    Args:
        place: the first line that does.
        answers: those of the example.
    """

    kind: str
    place: str
    answers: tuple[str, ...]

    @classmethod
    def of(cls, kind: str, place: str, tensors: Sequence[Tensor], *, grad: bool) -> Self:
        """What is answered about these tensors, in this grad mode."""
        return cls(kind, place, answers(kind, tensors, grad=grad))

    def difference(self, tensors: Sequence[Tensor], wheres: Sequence[str]) -> str:
        """How the answers of a call differ from those of the example; "" if they do not."""
        found = answers(self.kind, tensors, grad=torch.is_grad_enabled())
        for now, before, where in zip(found, self.answers, ("", *wheres), strict=False):
            if now != before:
                subject = f"{where} of the batch" if where else "the grad mode of the call"
                return f"{subject} is {now}, in the example it is {before}, and forward asks for it at {self.place}"
        return ""

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Ask:
        return Ask(found["kind"], found["place"], tuple(found["answers"]))


def answers(kind: str, tensors: Sequence[Tensor], *, grad: bool) -> tuple[str, ...]:
    """The grad mode, on which all depends but memory formats, and of each tensor what is asked for."""
    mode = "" if kind == MEMORY_FORMAT else "on" if grad else "off"
    if kind == GRAD_MODE:
        return (mode,)
    each = _requires_grad if kind == REQUIRES_GRAD else memory_format
    return (mode, *map(each, tensors))


def _requires_grad(tensor: Tensor) -> str:
    return "one that requires a gradient" if tensor.requires_grad else "one that requires no gradient"


def memory_format(tensor: Tensor) -> str:
    """How a tensor lies in memory.

    >>> memory_format(torch.zeros(2, 3)), memory_format(torch.zeros(2, 3).T)
    ('contiguous', 'strided (1, 3)')
    """
    if tensor.is_contiguous():
        return "contiguous"
    for name, (format, dims) in FORMATS.items():
        if tensor.dim() == dims and tensor.is_contiguous(memory_format=format):
            return name
    return f"strided {tuple(tensor.stride())}"

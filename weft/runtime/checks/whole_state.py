"""Whole optimizer state on a rank that stores parts: cut as its parameters are.

In: an optimizer that has loaded the state of an eager run, which is of whole parameters, by position. Out: the same
optimizer, whose state is of the parts that the rank stores. State of any other shape stays: an optimizer that keeps
some mixes elements, and is refused on parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.runtime.layout.index import Shape, take
from weft.runtime.layout.transfer import Index


@dataclass(frozen=True)
class PartOf:
    """Where the part of a parameter lies that a rank stores: the shape of the whole, and a range for each dim."""

    shape: Shape
    index: Index


def cut_state(optimizer: torch.optim.Optimizer, parts: Mapping[nn.Parameter, PartOf]) -> None:
    """Keep of whole state what belongs to the rank's parts."""
    for parameter, state in optimizer.state.items():
        part = parts.get(parameter) if isinstance(parameter, nn.Parameter) else None
        if part is None or not isinstance(state, dict):
            continue
        for name, value in state.items():
            if isinstance(value, Tensor) and tuple(value.shape) == tuple(part.shape):
                state[name] = take(value, part.index).clone(memory_format=torch.contiguous_format)

"""The batches that both sides of a comparison train on: the example, one of other values, and the example again.

In: the example. Out: the same arguments with other tensors. A program that keeps something of a batch, or of the
weights that it had in one, is right on the first batch and wrong on the next. Other values must be such as the model
may meet: what is floating is mixed with the row before, so that it stays in every range and in every sum that rows
keep; whole numbers change places. A model that fails on them, or whose loss is not finite, is compared on the example
alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

NUM_STEPS = 3
OTHER_STEP = 1
"""The step that is done on a batch of other values; after it the model is evaluated, on that batch."""
KEPT = 0.75
"""How much of a row stays."""


def batches_of(example: Any, *, other: bool) -> list[Any]:
    """The batch of each step, in memory of its own: a forward may write to its input."""
    return [
        tree_map(_changed, copy.deepcopy(example)) if other and step == OTHER_STEP else copy.deepcopy(example)
        for step in range(NUM_STEPS)
    ]


def _changed(value: Any) -> Any:
    """A tensor of other values; anything else as it is.

    >>> _changed(torch.tensor([[0.0, 1.0], [4.0, 5.0]]))
    tensor([[1., 2.],
            [3., 4.]])
    >>> _changed(torch.tensor([1, 2, 3]))
    tensor([3, 1, 2])
    """
    if not isinstance(value, Tensor) or not value.dim() or value.dtype == torch.bool:
        return value
    changed = value.detach().clone()
    if value.is_floating_point() or value.is_complex():
        other = changed.roll(1, 0) if value.shape[0] > 1 else changed.flip(tuple(range(value.dim())))
        changed = (KEPT * changed + (1 - KEPT) * other).to(value.dtype)
    else:
        changed = changed.flatten().roll(1).view(value.shape)
    # dims that are marked as dynamic are marks on the tensor
    changed.__dict__.update(value.__dict__)
    return changed.requires_grad_(value.requires_grad)

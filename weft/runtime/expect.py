"""Expectations: what a branch of the model's forward was taken to be when the model was captured.

In: a value, and truth values with what is expected of them. Out: the value. Raises in a step that goes another way: the
program holds one branch only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def expect(value: Tensor, predicates: Sequence[Tensor], *, expected: Sequence[bool], places: Sequence[str]) -> Tensor:
    """The value, if every predicate is what is expected of it."""
    for predicate, wanted, place in zip(predicates, expected, places, strict=True):
        torch._assert_async(
            (predicate.detach().bool() == wanted).reshape(()),
            f"{place}: the program was made for a forward in which this is {wanted}; it is {not wanted} in this step",
        )
    return value.clone()

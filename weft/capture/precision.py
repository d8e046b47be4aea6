"""Precision as users say it: what is none, or does not fit a module, is refused with what to write instead.

In: a `weft.Precision`, a name (`bf16`), a dtype, or None. Out: a Precision that fits the module, or an error of ours at
the place where it was said. What one means is the runtime's (`runtime/precision.py`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from weft.capture.source import place_of_call
from weft.errors import RunError, WeftError
from weft.runtime.weights import precision
from weft.runtime.weights.precision import BadPrecision


class Precision(precision.Precision):
    """In which dtypes a model computes, and in which its gradients are added up (docs/state.md).

    Args:
        compute: of forward and backward; masters of the weights stay in float32.
        reduce: of sums of gradients over ranks; None: as they arise.
        accumulate: of sums of gradients over micro-batches; None: as they arise.
        keep: patterns of names of parameters that stay as they are; `*` stands for anything.

    Raises:
        RunError: one of them is no such thing.
    """

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except BadPrecision as wrong:
            raise RunError(str(wrong), place=place_of_call(), remedy=wrong.remedy) from None


def chosen_precision(
    given: Any, module: nn.Module, *, error: type[WeftError], place: str | None = None
) -> precision.Precision | None:
    """The precision that a user asks for; refuses what is none, and one that does not fit the module.

    Args:
        error: the kind of error, by who was asked.
        place: where it was said; the line that called into Weft if not given.
    """
    if given is None:
        return None
    try:
        asked = isinstance(given, precision.Precision)
        found: precision.Precision = given if asked else Precision(precision.dtype_of(given))
        found.masters(module)
    except BadPrecision as wrong:
        raise error(str(wrong), place=place_of_call() if place is None else place, remedy=wrong.remedy) from None
    return found

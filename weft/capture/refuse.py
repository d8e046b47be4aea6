"""Errors of torch.export in the user's terms.

Enters: an exception raised while tracing. Leaves: a `CaptureError` with the user's line, what happened there, what to
change. Interrupts pass through.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import nn
from torch._dynamo.exc import UserError
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

from weft.capture.example import forward_place
from weft.capture.source import source_of_error
from weft.errors import CaptureError

BRANCH_REMEDY = (
    "compute both sides and choose with torch.where, decide outside forward, or make the choice a constructor argument"
)


class Translating:
    """While this is entered, errors leave as `CaptureError`s."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, CaptureError):
            raise translate(error, self.module) from error


def translate(error: Exception, module: nn.Module) -> CaptureError:
    """The same fact as a user error."""
    source = source_of_error(error.__traceback__)
    place = str(source) if source.line else forward_place(module)
    first = str(error).strip().split("\n")[0]
    if is_data_dependent(error):
        return CaptureError(
            f"what happens here depends on the values in a tensor, not only on shapes: {first}",
            place=place,
            remedy=BRANCH_REMEDY,
        )
    if isinstance(error, ConstraintViolationError) or is_constraint(error):
        return CaptureError(
            f"a dim marked dynamic cannot vary: {reason(error)}",
            place=place,
            remedy="leave that dim out of `dynamic`, or remove the dependence on its size",
        )
    return CaptureError(
        f"forward could not be traced: {type(error).__name__}: {first}",
        place=place,
        remedy="see whether forward(*example) runs as it stands; then move what cannot be traced out of forward",
    )


def is_data_dependent(error: BaseException) -> bool:
    kinds = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
    if isinstance(error, kinds):
        return True
    if isinstance(error, torch.fx.experimental.symbolic_shapes.PendingUnbackedSymbolNotFound):
        return True
    words = ("data-dependent", "unbacked", "_local_scalar_dense", "Cannot cast FakeTensor", "aten.item")
    return any(word in str(error) for word in words)


def is_constraint(error: BaseException) -> bool:
    return isinstance(error, UserError) and "onstraint" in str(error)


def reason(error: BaseException) -> str:
    """The first line of a constraint violation that says something."""
    lines = [line.strip(" -") for line in str(error).split("\n") if line.strip()]
    return next((line for line in lines if "but" in line or "specialized" in line or "guard" in line), lines[0])

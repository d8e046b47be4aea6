"""Errors of torch.export in the user's terms.

Enters: an exception raised while tracing. Leaves: a `CaptureError` with the user's line, what happened there, what to
change. Interrupts pass through.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import UncapturedHigherOrderOpError, UserError
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
)

from weft.capture.example import RAGGED_REMEDY, forward_place
from weft.capture.source import TORCH, place_here, place_of_error
from weft.errors import CaptureError

BRANCH_REMEDY = (
    "compute both sides and choose with torch.where, decide outside forward, or make the choice a constructor argument"
)
NUMBER = "a Python number is taken from the values in a tensor"
NUMBER_REMEDY = (
    "to log it, return it as an output instead of reading it in forward; to compute with it, keep it a tensor "
    "(no .item(), int(), float(), .tolist(), .numpy())"
)
LOOP = "a loop runs as often as the values in a tensor say"
LOOP_REMEDY = (
    "loop over a range known beforehand, and mask; experts of most transformers models run without a loop after "
    'model.set_experts_implementation("grouped_mm")'
)
FIXED_REMEDY = "leave that dim unmarked (weft.dynamic), mark all inputs that share it, or let forward not depend on it"
KEY_REMEDY = (
    "leave that dim unmarked (weft.dynamic), or keep one table, built anew when it is too short, and a slice of it"
)
READS = (
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__index__,
    torch.Tensor.__complex__,
    torch.Tensor.__format__,
)
"""What takes Python numbers out of a tensor."""
TOLD: Mapping[Any, tuple[str, str]] = {
    **dict.fromkeys(READS, (NUMBER, NUMBER_REMEDY)),
    torch.Tensor.unbind: (LOOP, LOOP_REMEDY),
}
"""What is said where these need to know values."""
VALUED: Mapping[str, tuple[str, str]] = {
    "aten.linalg_lstsq.default": (
        "torch.linalg.lstsq returns residuals whose shape is known by the rank of the matrix only, also where nobody "
        "reads them",
        "torch.linalg.pinv(A) @ B, the normal equations (torch.linalg.solve(A.mT @ A, A.mT @ B)), or torch.linalg.qr",
    ),
}
"""What is said of operators whose results have such shapes, although forward needs none of them."""
INSIDE = (
    (
        f"{TORCH}distributions{os.sep}",
        {"__init__", "check", "_validate_sample"},
        "a distribution checks the values that it is made of, which only the run knows",
        "make it with validate_args=False",
    ),
    (
        f"{TORCH}nn{os.sep}init",
        {"_no_grad_trunc_normal_"},
        "trunc_normal_ draws again until all numbers lie within the bounds: how often, only the run knows",
        "transform torch.rand by the inverse of the distribution function (torch.erfinv), or clamp torch.randn",
    ),
)
"""Places in torch that need values: files, functions, what is said, and the remedy."""
OPERATOR = re.compile(r"aten\.(?!_local_scalar_dense)\w+\.\w+")
DEVICE = re.compile(r"same device, but found|support for \w+ devices|not compiled with|No HIP GPUs|Found no NVIDIA")

FAULTS = (
    (
        DEVICE,
        "forward puts a tensor on a device of its own choice: {}",
        "take the device from an input or a parameter (device=x.device) instead of naming one",
    ),
    (
        re.compile("Cannot access data pointer"),
        "forward copies a parameter or a module (copy.deepcopy), or hands the memory of a tensor to code outside torch",
        "copy a module in __init__ and a tensor by clone(); register a function that needs the memory "
        "(weft.register_op)",
    ),
)
"""Words of torch's errors, what is said, and the remedy."""


@contextmanager
def translating(module: nn.Module) -> Iterator[None]:
    """While this is entered, errors leave as `CaptureError`s."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        raise translate(error, module) from error


@contextmanager
def telling(message: str, remedy: str) -> Iterator[None]:
    """While this is entered, forward needs what only the run knows (a number out of a tensor, how long it is): errors
    leave as a `CaptureError` that says so."""
    try:
        yield
    except RuntimeError as error:
        if is_data_dependent(error) or ".numpy()" in str(error):
            raise CaptureError(message, place=place_here(), remedy=remedy) from error
        raise


def translate(error: Exception, module: nn.Module) -> CaptureError:
    """The same fact as a user error."""
    place = place_of_error(error.__traceback__) or forward_place(module)
    first = str(error).strip().split("\n")[0]
    if is_data_dependent(error):
        message, remedy = needs_values(error, first)
        return CaptureError(message, place=place, remedy=remedy)
    if is_nested(error):
        return CaptureError(
            "forward makes a nested tensor, which a graph does not hold", place=place, remedy=RAGGED_REMEDY
        )
    if isinstance(error, UncapturedHigherOrderOpError):
        return CaptureError(
            "forward calls torch.cond or another operator that takes functions: only the one that runs is known",
            place=place,
            remedy=BRANCH_REMEDY,
        )
    if isinstance(error, TypeError) and "unhashable" in first and "SymInt" in first:
        return CaptureError(
            "a size that is marked dynamic is looked up in a dict or an lru_cache", place=place, remedy=KEY_REMEDY
        )
    if isinstance(error, TypeError) and any(word in first for word in ("SymFloat", "SymInt", "SymBool")):
        return CaptureError(NUMBER, place=place, remedy=NUMBER_REMEDY)
    for words, message, remedy in FAULTS:
        if words.search(first):
            return CaptureError(message.format(first), place=place, remedy=remedy)
    if is_constraint(error):
        return CaptureError(
            f"a dim marked dynamic cannot vary: {reason(error)}",
            place=place,
            remedy=FIXED_REMEDY,
        )
    return CaptureError(
        f"forward could not be traced: {type(error).__name__}: {first}",
        place=place,
        remedy="see whether forward(*example) runs as it stands; then move what cannot be traced out of forward",
    )


def needs_values(error: Exception, first: str) -> tuple[str, str]:
    """What is said of a forward that needs values, and the remedy."""
    if first in VALUED:
        return VALUED[first]
    frames = traceback.extract_tb(error.__traceback__)
    for file, names, message, remedy in INSIDE:
        if any(file in one.filename and one.name in names for one in frames):
            return message, remedy
    operator = f" ({first})" if OPERATOR.fullmatch(first) else ""
    return f"what happens here depends on the values in a tensor, not only on shapes{operator}", BRANCH_REMEDY


def is_data_dependent(error: BaseException) -> bool:
    kinds = (
        GuardOnDataDependentSymNode,
        DataDependentOutputException,
        DynamicOutputShapeException,
        PendingUnbackedSymbolNotFound,
    )
    words = ("data-dependent", "unbacked", "_local_scalar_dense", "Cannot cast FakeTensor", "aten.item")
    return isinstance(error, kinds) or any(word in str(error) for word in words)


def is_nested(error: BaseException) -> bool:
    """Whether a nested tensor was being made, or computed with."""
    frames = traceback.extract_tb(error.__traceback__)
    return "_nested_" in str(error) or any(f"{TORCH}nested{os.sep}" in frame.filename for frame in frames)


def is_constraint(error: BaseException) -> bool:
    told = isinstance(error, UserError) and "onstraint" in str(error)
    return told or isinstance(error, ConstraintViolationError)


def reason(error: BaseException) -> str:
    """The first line of a constraint violation that says something."""
    lines = [line.strip(" -") for line in str(error).split("\n") if line.strip()]
    return next((line for line in lines if "but" in line or "specialized" in line or "guard" in line), lines[0])

"""Memory that parameters, buffers and constants share.

Enters: the state of a module after its forward was converted. Leaves: nothing, or a `CaptureError`. Every stored tensor
has memory of its own on the devices, so what shares memory in the original would come apart here when one of the two
changes: a parameter that an optimizer updates, a buffer that forward writes. Tied names of one tensor are not meant:
they stay one tensor. Tensors that never change may overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weft.capture.state import State
from weft.errors import CaptureError


@dataclass(frozen=True)
class Lying:
    """A tensor with memory: what users call it, and whether training changes it."""

    what: str
    value: torch.Tensor
    changes: bool

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of its storage between its first and its last element."""
        value = self.value
        first = int(value.storage_offset()) * value.itemsize
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        return first, first + (last + 1) * value.itemsize


def refuse_aliases(state: State) -> None:
    """Raise if a tensor that training changes shares memory with another."""
    by_storage: dict[int, list[Lying]] = {}
    for one in _lying(state):
        if one.value.numel():
            by_storage.setdefault(one.value.untyped_storage()._cdata, []).append(one)
    for found in by_storage.values():
        for at, one in enumerate(found):
            for other in found[:at]:
                if (one.changes or other.changes) and _overlap(one, other):
                    _refuse(other, one)


def _lying(state: State) -> Iterator[Lying]:
    for stored in state.parameters:
        yield Lying(f"the parameter {stored.names[0]}", stored.value, changes=True)
    for stored in state.buffers:
        written = stored.handle is not None and stored.handle.cell.version > 0
        yield Lying(f"the buffer {stored.names[0]}", stored.value, written)
    for constant in state.constants:
        if isinstance(constant.value, torch.Tensor):
            name = "a tensor that forward reads" if constant.label == "constant" else f"the attribute {constant.label}"
            yield Lying(name, constant.value, changes=False)


def _overlap(one: Lying, other: Lying) -> bool:
    (start, end), (other_start, other_end) = one.span, other.span
    if end <= other_start or other_end <= start:
        return False
    # the columns of one matrix lie between each other without sharing an element
    memory = torch.zeros(one.value.untyped_storage().nbytes(), dtype=torch.bool)
    _bytes(memory, other.value).fill_(True)
    return bool(_bytes(memory, one.value).any())


def _bytes(memory: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Where the elements of a tensor begin, in a map of the bytes of its storage."""
    strides = [stride * value.itemsize for stride in value.stride()]
    return memory.as_strided(value.shape, strides, value.storage_offset() * value.itemsize)


def _refuse(one: Lying, other: Lying) -> None:
    raise CaptureError(
        f"{one.what} and {other.what} share memory: on one device a change of one changes the other, here they are two "
        "tensors",
        remedy="give one of them memory of its own (.clone()), or use one nn.Parameter under both names; a "
        "parameter that a list or an object holds besides: read it as an attribute of its module, or from an "
        "nn.ParameterList",
    )

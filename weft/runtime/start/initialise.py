"""Exact initialisation: each rank gets its parts of the values that the original module would start from.

In: whole tensors, or a way to get at them one by one, and what this rank stores. Out: the rank's parts, in memory of
their own. What a function makes is recorded and replayed tensor by tensor (`recording.py`, `replaying.py`): the same
values on every rank and under every plan as `torch.manual_seed(seed)` and the function would give on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from weft.runtime.layout.execute import size, take
from weft.runtime.layout.transfer import Index
from weft.runtime.start.record import Record
from weft.runtime.start.recording import Unrecordable, record_module
from weft.runtime.start.replaying import fill_strays


class Whole(Protocol):
    """A whole tensor of which parts can be read: a Tensor, or an entry of a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype | None:
        """None if torch does not have it."""
        ...

    def read(self, index: Index) -> Tensor:
        """The part at `index`, in memory of its own."""
        ...


def part_of(tensor: Tensor | Whole, index: Index, name: str = "") -> Tensor:
    """A part, in memory of its own: it keeps nothing of the whole alive."""
    part = (
        take(tensor.detach(), index).clone(memory_format=torch.contiguous_format)
        if isinstance(tensor, Tensor)
        else tensor.read(index)
    )
    assert tuple(part.shape) == size(index), f"part of {name} has shape {tuple(part.shape)}, not {size(index)}"
    return part


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every name it has."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def original_order(module: nn.Module) -> dict[str, int]:
    """The place of every name in the order in which `named_parameters()` and `state_dict()` of the module go."""
    names = (
        f"{path}.{name}" if path else name
        for path, inner in module.named_modules(remove_duplicate=False)
        for held in (inner._parameters, inner._buffers)
        for name, tensor in held.items()
        if tensor is not None
    )
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def build(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module as `torch.manual_seed(seed)` and the call would make it. The caller's generators are as before."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return factory()


@dataclass(frozen=True)
class Start:
    """What a function makes, before its values are wanted.

    Args:
        module: to be captured; its parameters are hollow if there is a record.
        record: how the values come about; None: the module has them.
        reason: why there is none.
    """

    module: nn.Module
    record: Record | None = None
    reason: str = ""


def begin(factory: Callable[[], nn.Module], seed: int) -> Start:
    """The module of a function without the values of its parameters, or whole where that is impossible."""
    try:
        return begin_hollow(factory, seed)
    except Unrecordable as error:
        return Start(build(factory, seed), reason=str(error))


def begin_hollow(factory: Callable[[], nn.Module], seed: int) -> Start:
    """The module of a function without the values of its parameters.

    Raises:
        Unrecordable: that is impossible."""
    recorded = record_module(factory, seed)
    fill_strays(recorded)
    return Start(recorded.module, recorded.record)

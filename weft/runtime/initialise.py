"""Exact initialisation: each rank gets its parts of the values that the original module would start from.

In: whole tensors, or a way to get at them one by one, and what this rank stores. Out: the rank's parts, in memory of
their own. `replay` builds the original module under a seed and keeps only this rank's ranges: the same values on
every rank and under every plan as `torch.manual_seed(seed)` followed by the constructor would give on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from weft.runtime.script import Index
from weft.runtime.transfers import size, take


class Whole(Protocol):
    """A whole tensor of which parts can be read: a Tensor, or an entry of a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, index: Index) -> Tensor:
        """The part at `index`, in memory of its own."""
        ...


def stored_parts(whole: Mapping[str, Tensor | Whole], stored: Mapping[str, Index]) -> dict[str, Tensor]:
    """This rank's parts of the tensors that it stores and that `whole` has.

    >>> stored_parts({"w": torch.arange(6)}, {"w": (((4, 6), (0, 1)),)})
    {'w': tensor([4, 5, 0])}
    """
    return {name: part_of(whole[name], index, name) for name, index in stored.items() if name in whole}


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


def build(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module as `torch.manual_seed(seed)` and the call would make it. The caller's generators are as before."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return factory()


def replay(factory: Callable[[], nn.Module], seed: int, stored: Mapping[str, Index]) -> dict[str, Tensor]:
    """Build the module under the seed, keep this rank's parts by dotted name, drop the rest.

    Seeds are a matter of the whole process: not for several threads at once."""
    return stored_parts(module_tensors(build(factory, seed)), stored)

"""Pieces: the programs that one rank of a pipeline runs, as one: what is stored under which name.

In: the modules of a rank's pieces, and how all pieces, those of other ranks too, store parameters and buffers. Out:
what a program tells of its parameters (`Holds` in stored.py). Promised: a parameter that several pieces of a rank hold
in the same way is one memory after `join_copies()`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from weft.runtime.layout.index import nothing, size
from weft.runtime.layout.transfer import Index
from weft.runtime.links.replicas import Replica
from weft.runtime.program.stored import Container, Part


class HasParts(Protocol):
    """A piece: its program, or the masters of its parameters."""

    @property
    def stored(self) -> Mapping[str, Index]: ...

    def part(self, name: str) -> Any: ...


P = TypeVar("P", bound=HasParts)


@dataclass(frozen=True)
class Copy:
    """A parameter that a further piece of the rank holds too.

    Args:
        index: what of the original it is.
        alike: it is stored as the first one is.
    """

    name: str
    first: nn.Parameter
    other: nn.Parameter
    index: Index
    alike: bool


@dataclass(frozen=True)
class Pieces(Generic[P]):
    """The pieces of a rank.

    Args:
        parts: parameters and buffers of all pieces of the pipeline, by first name; trainable: those that are trained.
            Both in the order of the original.
        order: the place of every name in the original.
    """

    modules: tuple[P, ...]
    transport: Replica
    parts: Mapping[str, Part]
    trainable: Mapping[str, Part]
    order: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def stored(self) -> dict[str, Index]:
        """What this rank holds of each parameter and buffer, by every name: as the first piece that does has it."""
        found: dict[str, Index] = {}
        for module in reversed(self.modules):
            found.update(module.stored)
        return found

    def stored_parts(self) -> dict[str, Part]:
        """How parameters and buffers are stored, by first name."""
        return dict(self.parts)

    def trained_parts(self) -> dict[str, Part]:
        """How trained parameters are stored, by first name."""
        return dict(self.trainable)

    def part(self, name: str) -> Any:
        """What the rank stores under a name; None if nothing."""
        return next((held for module in self.modules if (held := module.part(name)) is not None), None)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer that the rank stores, once, by first name."""
        for name in self.parts:
            held = self.part(name)
            if held is not None:
                yield name, held

    def empty(self, names: Collection[str]) -> dict[str, nn.Parameter]:
        """A parameter without elements for each one of these names of which the rank stores nothing, by first name."""
        return {
            name: nn.Parameter(
                torch.empty(size(nothing(part.shape)), dtype=part.dtype, device=self.transport.device),
                requires_grad=name in self.trainable,
            )
            for name, part in self.parts.items()
            if name in names and self.part(name) is None
        }

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters that this rank stores a part of, each once."""
        for name, held in self.held():
            if name in self.trainable and isinstance(held, nn.Parameter):
                yield name, held

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """Parameters that several pieces of the rank hold."""
        found = []
        for name in self.parts:
            holders = [module for module in self.modules if isinstance(module.part(name), nn.Parameter)]
            # a piece that borrows has no copy: it holds the very parameter of another
            others = {id(module.part(name)): module for module in reversed(holders)}
            for other in reversed(others.values()):
                if other.part(name) is not holders[0].part(name):
                    index = other.stored[name]
                    alike = index == holders[0].stored[name]
                    found.append(Copy(name, holders[0].part(name), other.part(name), index, alike))
        return tuple(found)

    def join_copies(self) -> None:
        """One memory for copies that are alike: an update of the first is an update of all. All are frozen with it.

        Before every step: a weight that is gathered may have been laid elsewhere in the one before."""
        for copy in self.copies:
            if copy.other.requires_grad != copy.first.requires_grad:
                copy.other.requires_grad_(copy.first.requires_grad)
            if copy.alike and copy.other.data_ptr() != copy.first.data_ptr():
                copy.other.data = copy.first.data

    @cached_property
    def apart(self) -> Mapping[str, Copy]:
        """Copies that an optimizer must update by themselves, each by a name of its own: NAME@2, NAME@3 ..."""
        found: dict[str, Copy] = {}
        for copy in self.copies:
            if not copy.alike:
                count = sum(one.name == copy.name for one in found.values())
                found[f"{copy.name}@{count + 2}"] = copy
        return found


def hold_all(pieces: Pieces[Any], empty: Mapping[str, nn.Parameter], tree: Container) -> None:
    """Put what the rank holds into a tree, and empty parameters in place of others, under every name, in the order of
    the original."""
    held = {**empty, **dict(pieces.held())}
    places = {each: name for name in pieces.parts if name in held for each in (name, *pieces.parts[name].tied)}
    for each in sorted(places, key=lambda each: pieces.order.get(each, len(pieces.order))):
        tree.hold(each, held[places[each]], persistent=pieces.parts[places[each]].persistent)

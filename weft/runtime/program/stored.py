"""Stored: what a program says about its parameters and buffers, and the containers that hold them.

    Part   := whole shape, cuts, dtype, how its gradient becomes complete
    Tables := what differs by rank and does not follow the axes of the grid, as this rank sees it

In: the tables at the head of a generated file. Out: nested containers under the original dotted names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from weft.runtime.layout.collectives import Irregular
from weft.runtime.layout.cuts import Axes, Cuts, Place, UnknownAxis, as_axes, as_cut
from weft.runtime.layout.moves import Move, all_reduce
from weft.runtime.layout.transfer import Index
from weft.runtime.links.transport import Transport
from weft.runtime.program.sizes import SizedTables


@dataclass(frozen=True)
class Table:
    """Stands for what the tables beside the program say under this key, for this rank."""

    key: str


@dataclass(frozen=True)
class Part:
    """How a parameter or buffer is stored.

    Args:
        shape: of the whole.
        cuts: for each dim that is cut the axes, or how; a Table where that does not follow the axes.
        use: how it is brought to where it is used, if that is in another layout than it is stored in, and the same
            wherever it is used.
        reads: how many operators read it as it is stored, in one forward; each of them in each chunk of a loop.
        sync: how the gradient of the parameter, used as it is stored, becomes complete: a sum along these axes, or
            moves one after the other; None if it is never used so.
        trained: it gets a gradient.
        tied: other names of the same parameter.
        persistent: of a buffer: it is saved.
        reached_from: of a program that returns several outputs, the positions of those that a gradient comes from;
            None: all of them. If the caller uses others only, the parameter has no gradient. Of one that no gradient
            reaches: ().
        keeps: what stays as it is used while the optimizer updates the part: the `weight`, brought up to date in each
            step; and the `gradient`, if it is added up so over the micro-batches of a step.
    """

    shape: tuple[int, ...]
    cuts: Cuts | Table | None = None
    dtype: torch.dtype = torch.float32
    use: Sequence[Move] = ()
    reads: int = 1
    sync: Axes | Sequence[Move] | Table | None = ()
    trained: bool = True
    tied: tuple[str, ...] = ()
    persistent: bool = True
    keeps: tuple[str, ...] = ()
    reached_from: tuple[int, ...] | None = None

    @property
    def sync_moves(self) -> tuple[Move, ...]:
        """How the gradient becomes complete, if moves say so and no table does."""
        if not self.sync or isinstance(self.sync, Table):
            return ()
        if isinstance(self.sync, str) or isinstance(self.sync[0], str):
            return (all_reduce(cast(Axes, self.sync)),)
        return tuple(cast(Sequence[Move], self.sync))


@dataclass(frozen=True)
class Tables:
    """What differs by rank, as this rank sees it."""

    here: Mapping[str, Any]
    """Sizes, intervals, groups."""
    parts: Mapping[str, Index | None]
    """What is stored of tensors that do not follow the axes; None: nothing."""
    moves: Mapping[str, Irregular]
    sized: SizedTables | None = None
    """Those that depend on sizes of the batch."""


NO_TABLES = Tables({}, {}, {})


class Holds(Protocol):
    """Says what a rank holds: a program, or all pieces of one."""

    @property
    def stored(self) -> Mapping[str, Index]: ...

    @property
    def transport(self) -> Transport: ...

    def stored_parts(self) -> dict[str, Part]: ...

    def trained_parts(self) -> dict[str, Part]: ...

    def part(self, name: str) -> Any: ...

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class Container(nn.Module):
    """Holds parameters, buffers and containers under the names they have in the original model."""

    _leaves: Mapping[str, Tensor] | None = None
    """What is read in place of parameters, while a program runs (`leaf_aliases.py`)."""

    def __getitem__(self, number: int) -> Any:
        # lists hold modules, parameters or buffers
        return getattr(self, str(number))

    def __iter__(self) -> Iterator[Any]:
        # by number: programs count layers, whatever order they are shown in
        numbers = sorted((name for name in self._modules if name.isdigit()), key=int)
        return iter([self._modules[name] for name in numbers])

    def __len__(self) -> int:
        return sum(name.isdigit() for name in self._modules)

    def __getattr__(self, name: str) -> Any:
        leaves = self.__dict__.get("_leaves")
        return leaves[name] if leaves is not None and name in leaves else super().__getattr__(name)

    def at(self, path: str) -> Any:
        """What stands under a dotted name, also one that cannot be written as attributes."""
        holder, last = self.holder_of(path)
        held_here: tuple[Mapping[str, Any], ...] = (holder._leaves or {}, holder._parameters, holder._buffers)
        return next(held[last] for held in (*held_here, holder._modules) if last in held)

    def holder_of(self, path: str, *, make: bool = False) -> tuple[Container, str]:
        """What holds a parameter or buffer directly, and its name there; `make`: the containers on the way."""
        *way, last = path.split(".")
        holder: Container = self
        for name in way:
            if make and name not in holder._modules:
                holder._modules[name] = type(self)()
            found = holder._modules[name]
            assert isinstance(found, Container)
            holder = found
        return holder, last

    def hold(self, path: str, tensor: Tensor, *, persistent: bool = True) -> None:
        """Put a parameter or buffer under a dotted name, making the containers on the way."""
        holder, last = self.holder_of(path, make=True)
        if isinstance(tensor, nn.Parameter):
            holder._parameters[last] = tensor
        else:
            holder._buffers[last] = tensor
            if not persistent:
                holder._non_persistent_buffers_set.add(last)


@dataclass(frozen=True)
class Original:
    """A tensor of the original model: its whole shape, all of its names, and whether a state dict has it."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    persistent: bool = True


def shapes_of(module: Holds) -> dict[str, Original]:
    """The parameters and buffers of the original model, by each of their names."""
    found: dict[str, Original] = {}
    for name, part in module.stored_parts().items():
        names = (name, *part.tied)
        found.update(dict.fromkeys(names, Original(part.shape, names, part.persistent)))
    return found


def in_order(parts: Mapping[str, Part], order: Mapping[str, int]) -> dict[str, Part]:
    """Parts by name, in the order of the original."""
    return {name: parts[name] for name in sorted(parts, key=lambda name: order.get(name, len(order)))}


def check_axes(parts: Mapping[str, Part], grid: Mapping[str, int]) -> None:
    """Refuse parts that are cut or summed along what is no axis of the grid."""
    place = Place(tuple(grid.items()), 0)
    for name, part in parts.items():
        cuts = {} if part.cuts is None or isinstance(part.cuts, Table) else part.cuts
        try:
            for axes in (*(as_axes(as_cut(cut).axes) for cut in cuts.values()), *(one.axes for one in part.sync_moves)):
                place.count(axes)
        except UnknownAxis as error:
            raise UnknownAxis(f"{name}: {error}") from None


def expand(parts: Mapping[str, Part], layers: Mapping[str, int]) -> Iterator[tuple[str, Part]]:
    """Names with `*` in place of a layer's number, spelled out: neighbours of one stack layer by layer.

    >>> [name for name, _ in expand({"h.*.a": Part((1,)), "h.*.b": Part((1,))}, {"h": 2})]
    ['h.0.a', 'h.0.b', 'h.1.a', 'h.1.b']
    """
    block: list[tuple[str, Part]] = []
    for name, part in [*parts.items(), ("", Part(()))]:
        stack = _stack(name)
        if block and _stack(block[0][0]) != stack:
            for number in range(layers[_stack(block[0][0])]):
                for pattern, each in block:
                    yield pattern.replace("*", str(number), 1), _numbered(each, number)
            block = []
        if stack:
            block.append((name, part))
        elif name:
            yield name, part


def _stack(name: str) -> str:
    return name[: name.index(".*")] if ".*" in name else ""


def _numbered(part: Part, number: int) -> Part:
    if not part.tied:
        return part
    return replace(part, tied=tuple(name.replace("*", str(number), 1) for name in part.tied))

"""StoredParts: what a program stores on one rank, under the original names.

In: the tables at the head of a generated file, a transport, the rank's values. Out: parameters and buffers in a tree of
containers, found by name; how each is stored, and how its gradient becomes complete. Programs of one rank may use the
very same parameters (`adopt`), or read those that another trains (`borrow`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import FunctionType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from weft.runtime.layout.cuts import Place, as_axes, index_at
from weft.runtime.layout.execute import size
from weft.runtime.layout.moves import chain
from weft.runtime.layout.transfer import Index, Transfer
from weft.runtime.links.transport import Group, Transport
from weft.runtime.program.name_passthrough import Own
from weft.runtime.program.stored import Container, Part, Table, Tables, check_axes, expand


class StoredParts(Own):
    """The parts of one rank."""

    _grid: ClassVar[Mapping[str, int]] = {}
    _stored: ClassVar[Mapping[str, Part]] = {}
    _buffered: ClassVar[Mapping[str, Part]] = {}
    model: Container
    """What the rank stores, under the original names."""
    trees: list[Container]
    """This one, and others that show its buffers."""

    def __init_subclass__(
        cls,
        *,
        grid: Mapping[str, int],
        parameters: Mapping[str, Part],
        buffers: Mapping[str, Part] | None = None,
        layers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init_subclass__()
        check_axes({**parameters, **(buffers or {})}, grid)
        cls._grid = grid
        cls._stored = dict(expand(parameters, layers or {}))
        cls._buffered = dict(expand(buffers or {}, layers or {}))

    @classmethod
    def axes(cls) -> frozenset[tuple[str, ...]]:
        """Axes along which ranks may talk: those that its functions name, and the moves of its parameters."""
        functions = [one for one in vars(cls).values() if isinstance(one, FunctionType)]
        named = {as_axes(one) for each in functions for one in each.__code__.co_consts if isinstance(one, str | tuple)}
        named |= {move.axes for part in cls._stored.values() for move in part.use} | cls.sum_axes()
        return frozenset(one for one in named if one and set(one) <= cls._grid.keys())

    @classmethod
    def sum_axes(cls) -> frozenset[tuple[str, ...]]:
        """Axes along which gradients of its parameters are summed."""
        return frozenset(move.axes for part in cls._stored.values() for move in part.sync_moves)

    def groups(self, axes: Collection[tuple[str, ...]]) -> set[Group]:
        """Those that this rank may talk in, known before it does.

        Args:
            axes: of all texts of the piece, so that members agree.
        """
        moves = self._tables.moves.values()
        ways = [one for move in moves for one in (*move.forward, *(move.backward or ()))]
        ways += [one for move in moves for by in move.by_chunk for one in (*by.forward, *by.backward)]
        return {self.place.group(one) for one in axes} | {one.group for one in ways if self.transport.rank in one.group}

    def __init__(self, transport: Transport, tables: Tables) -> None:
        super().__init__()
        tree = Container()
        self.__dict__["model"], self.trees = tree, [tree]
        self.show(tree)
        self.transport, self.device = transport, transport.device
        self.place = Place(tuple(self._grid.items()), transport.rank)
        self._tables = tables
        self.stored: dict[str, Index] = {}
        """What this rank holds of each parameter and buffer, by every name."""
        self._parts: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._borrowed: set[str] = set()

    @classmethod
    def grid(cls) -> Mapping[str, int]:
        """The axes of the grid and their sizes."""
        return cls._grid

    @classmethod
    def stored_parts(cls) -> dict[str, Part]:
        """How parameters and buffers are stored, by first name."""
        return {**cls._stored, **cls._buffered}

    @classmethod
    def trained_parts(cls) -> dict[str, Part]:
        """How trained parameters are stored, by first name."""
        return {name: part for name, part in cls._stored.items() if part.trained}

    def listen_to(self, name: str, parameter: Tensor) -> None:
        """A trained parameter is held."""

    def replaced(self) -> None:
        """Another parameter stands in the place of one."""

    def hold_parts(self, state: Mapping[str, Tensor] | None) -> None:
        """Make the rank's parts; `state`: their values by name, zeros if not given."""
        for name, part in self._stored.items():
            self._hold(name, part, state, trained=True)
        for name, part in self._buffered.items():
            self._hold(name, part, state, trained=False)

    def _hold(self, name: str, part: Part, state: Mapping[str, Tensor] | None, *, trained: bool) -> None:
        index = self._index(part)
        if index is None:
            return
        shape = size(index)
        if state is not None and name in state:
            tensor = state[name].detach().to(self.device)
            assert tuple(tensor.shape) == shape, f"the part of {name} has shape {tuple(tensor.shape)}, planned {shape}"
        else:
            tensor = torch.zeros(shape, dtype=part.dtype, device=self.device)
        if trained:
            tensor = nn.Parameter(tensor, requires_grad=part.trained)
            self._names[id(tensor)] = name
            if part.trained:
                self.listen_to(name, tensor)
        self._parts[name] = tensor
        for each in (name, *part.tied):
            self.stored[each] = index
            self.model.hold(each, tensor, persistent=part.persistent)

    def _index(self, part: Part) -> Index | None:
        if isinstance(part.cuts, Table):
            return self._tables.parts[part.cuts.key]
        return index_at(part.shape, part.cuts or {}, self.place)

    def part(self, name: str) -> Any:
        """What the rank stores under a name; None if nothing."""
        held = self._parts.get(name)
        return self.model.at(name) if held is not None and name in self._buffered else held

    def adopt(self, name: str, parameter: nn.Parameter) -> None:
        """Use this very parameter under a name, as another program of the same model does."""
        if self._parts.get(name) is parameter or name not in self._stored:
            return
        self._replace(name, parameter)
        if self._stored[name].trained:
            self.listen_to(name, parameter)

    def borrow(self, name: str, parameter: nn.Parameter) -> None:
        """Read this very parameter under a name: another program of this rank holds and trains it."""
        self._borrowed.add(name)
        self._replace(name, parameter)

    def _replace(self, name: str, parameter: nn.Parameter) -> None:
        # what stands there next, once the one before is gone, is not it
        self._names.pop(id(self._parts.get(name)), None)
        self._parts[name], self._names[id(parameter)] = parameter, name
        for each in (name, *self._stored[name].tied):
            self.model.hold(each, parameter)
        self.replaced()

    def name_of(self, parameter: Tensor) -> str:
        """The name of a parameter."""
        return self._names[id(parameter)]

    def keeps(self, name: str) -> bool:
        """True if a parameter stays as it is used while the optimizer updates its part."""
        return "weight" in self._stored[name].keeps

    def update(self, name: str, value: Tensor) -> None:
        """A buffer's new content."""
        value = value.detach()
        for each in (name, *self._buffered[name].tied):
            for tree in self.trees:
                holder, last = tree.holder_of(each)
                holder._buffers[last] = value

    def take_buffers(self, source: StoredParts) -> None:
        """Take over what another program has made of the buffers."""
        for name in self.stored:
            held = source.part(name) if name in source.stored else None
            if held is not None and not isinstance(held, nn.Parameter):
                self.update(name, held)

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters that this rank stores a part of, in the order of use."""
        for name, part in self._stored.items():
            if part.trained and name in self._parts and name not in self._borrowed:
                yield name, cast(nn.Parameter, self._parts[name])

    def sync_order(self) -> Iterator[tuple[str, Part]]:
        """All trained parameters, as their gradients become complete: in the reverse order of use."""
        return ((name, self._stored[name]) for name in reversed(list(self._stored)) if self._stored[name].trained)

    def sync_transfers(self, name: str) -> tuple[Transfer, ...] | None:
        """How the gradient of a parameter used as stored becomes complete; None if it is not used so."""
        part = self._stored[name]
        if part.sync is None or name not in self._parts:
            return None
        if isinstance(part.sync, Table):
            return self._tables.moves[part.sync.key].forward
        return chain(part.sync_moves, tuple(self._parts[name].shape), self.place)[0]

"""Surface: what the original module shows besides parameters and buffers: its submodules, their modes and attributes.

In: the original module. Out: a tree of containers under the names of all its submodules, also of those without
parameters. A program is made for the modes and attributes that the module had: what is in training mode now is told
(`modes_of`), so that a program for these modes can be made; an attribute that forward may read cannot be set, since no
program would read it. Other attributes, those of the caller's own, can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from weft.errors import Refuse
from weft.runtime.checks.outside import Owners, owners_of
from weft.runtime.program.batch import dtype_name
from weft.runtime.program.calling import Arguments, Calling, calling_of
from weft.runtime.program.stored import Container

STANDARD = frozenset(vars(nn.Module()))
Modes = frozenset[str]
"""The paths of the submodules that are in training mode; the module itself is ""."""
UNREAD = "make it a buffer (register_buffer) and change its values, pass it to forward, or set it before parallelize()"


@dataclass(frozen=True)
class Surface:
    """What a module shows.

    Args:
        attributes: of each submodule, by path.
        aliases: further paths of submodules, each with the first one.
        modes: those that it was captured in.
        train: what the original's own `train(mode)` makes of the modes; None if it is that of any module.
        calling: how its forward is called.
        owners: its submodules, to be looked at when their attributes are read.
    """

    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    modes: Modes = frozenset({""})
    train: Callable[[bool], Modes] | None = None
    calling: Calling | None = None
    owners: Owners = field(default_factory=dict)


def surface_of(
    module: nn.Module, original: Callable[[], nn.Module], example: Arguments, *, live: bool = True
) -> Surface:
    """The surface of a module.

    Args:
        original: gives the module again; it is not kept.
        example: the arguments of a call.
        live: the module itself is the original, and stays.
    """
    own_train = any(type(sub).train is not nn.Module.train for sub in module.modules())

    def train(mode: bool) -> Modes:
        return modes_after(original(), mode)

    attributes, aliases, first = dict[str, Mapping[str, Any]](), dict[str, str](), dict[int, str]()
    for path, sub in module.named_modules(remove_duplicate=False):
        if (known := first.setdefault(id(sub), path)) == path:
            attributes[path] = dict(_attributes(sub))
        else:
            aliases[path] = known
    calling = calling_of(module.forward, *example)
    return Surface(
        attributes, aliases, modes_of(module), train if own_train else None, calling, owners_of(module, live=live)
    )


def modes_of(module: nn.Module) -> Modes:
    """What is in training mode."""
    return frozenset(path for path, sub in module.named_modules(remove_duplicate=False) if sub.training)


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Afterwards each submodule is in the mode that it is in now."""
    before = modes_of(module)
    try:
        yield
    finally:
        set_modes(module, before)


def modes_after(module: nn.Module, mode: bool) -> Modes:
    """What `train(mode)` puts into training mode; the module stays as it is."""
    with modes_kept(module):
        module.train(mode)
        return modes_of(module)


def set_modes(module: nn.Module, modes: Modes) -> None:
    """Put exactly these submodules into training mode."""
    for path, sub in module.named_modules(remove_duplicate=False):
        sub.training = path in modes


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes of the module and of its classes. Values that hold tensors are not kept: they may be large."""
    for kind in reversed(type(module).__mro__[: type(module).__mro__.index(nn.Module)]):
        for name, value in vars(kind).items():
            if not (name.startswith("__") or callable(value) or isinstance(value, staticmethod | classmethod)):
                yield name, None if isinstance(value, property) else value
    for name, value in vars(module).items():
        if name not in STANDARD:
            yield name, None if isinstance(value, Tensor | nn.Module | list | tuple | dict | set) else value


class Attributes(nn.Module):
    """A module that shows attributes of the original, to be read."""

    _path = ""
    _attributes: Mapping[str, Any] = MappingProxyType({})
    _assigned: Mapping[str, Callable[[Tensor], None]] = MappingProxyType({})
    """What sets buffers that others hold."""

    def tell(self, attributes: Mapping[str, Any], refuse: Refuse, path: str = "") -> None:
        """Say what the original has here, and how to refuse a change of it."""
        self.__dict__.update(_attributes=attributes, _refuse=refuse, _path=path)

    def __setattr__(self, name: str, value: Any) -> None:
        if (assign := self._assigned.get(name)) is not None and isinstance(value, Tensor):
            return assign(value)
        if name not in self.__dict__ and not isinstance(value, nn.Module | nn.Parameter):
            self._refuse_set(name, value)
        return super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self._attributes:
                return self._attributes[name]
            raise

    def _refuse_set(self, name: str, value: Any) -> None:
        """Refuse what nothing would read, and what a buffer cannot hold."""
        held = self.__dict__.get("_buffers", {}).get(name)
        dotted = ".".join(filter(None, (self._path, name)))
        if held is None and name in self._attributes:
            message = f"{dotted} is set, and programs do not read it: they were made with the value that it had"
            raise self.__dict__["_refuse"](message, UNREAD)
        if isinstance(value, Tensor) and held is not None and (value.shape, value.dtype) != (held.shape, held.dtype):
            raise self.__dict__["_refuse"](
                f"the buffer {dotted} is {dtype_name(held.dtype)}{list(held.shape)} on this rank, and is set to "
                f"{dtype_name(value.dtype)}{list(value.shape)}",
                "set what the rank holds of it; load_state_dict() takes what state_dict() gave",
            )


class Shown(Attributes, Container):
    """A submodule of the original as a parallel module shows it."""


def shown_tree(surface: Surface, refuse: Refuse) -> Shown:
    """Containers under the names of all submodules, in the modes that they are in."""
    tree = Shown()
    for path, attributes in surface.attributes.items():
        holder, _ = tree.holder_of(f"{path}.x" if path else "x", make=True)
        assert isinstance(holder, Shown)
        holder.tell(attributes, refuse, path)
    for path, first in surface.aliases.items():
        holder, name = tree.holder_of(path)
        holder._modules[name] = tree.get_submodule(first)
    set_modes(tree, surface.modes)
    return tree

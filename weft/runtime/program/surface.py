"""Surface: what the original module shows besides parameters and buffers: its submodules, their modes and attributes.

In: the original module. Out: of each submodule, also of those without parameters, its class, its attributes and its
extra state, as data (`shown/` shows them); the attributes that its parameters have. A program is made for the modes
and attributes that the module had: what is in training mode now is told (`modes_of`), so that a program for these modes
can be made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weft.runtime.checks.outside import Owners, owners_of
from weft.runtime.program.calling import Arguments, Calling, calling_of
from weft.runtime.program.read_only import holds_tensors

STANDARD = frozenset(vars(nn.Module()))
Modes = frozenset[str]
"""The paths of the submodules that are in training mode; the module itself is ""."""
HELD = object()
"""In place of a value of the original's that is not kept: it holds tensors, which may be large, and change."""
NO_STATE = object()
EXTRA = "_extra_state"
"""The last part of the name of an extra state in state dicts."""
OUR_MARK = "_weft"


@dataclass(frozen=True)
class Node:
    """What one submodule shows.

    Args:
        kind: its class; None of what shows nothing.
        attributes: its own, and those of its classes; of those that hold tensors HELD.
        parameters, buffers, children: the names of its parameters, buffers and submodules.
        text: what its `repr` says of it.
        extra: what its `get_extra_state` gives; NO_STATE if it has none, HELD if that cannot be said.
    """

    kind: type[Any] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    children: frozenset[str] = frozenset()
    text: str = ""
    extra: Any = NO_STATE


@dataclass(frozen=True)
class Surface:
    """What a module shows.

    Args:
        nodes: each submodule, by path.
        aliases: further paths of submodules, each with the first one.
        modes: those that it was captured in.
        calling: how its forward is called.
        marks: the attributes of its parameters, by all of their names.
        original: gives the module again; None if nobody can.
        own_modes: it has a `train()` or `eval()` of its own.
        owners: its submodules, to be looked at when their attributes are read.
        rerun: for the arguments of a call (None: the example) and modes, tells where forward does something else than
            now, "" where it does not. None if nobody has the module.
    """

    nodes: Mapping[str, Node] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    modes: Modes = frozenset({""})
    calling: Calling | None = None
    marks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    original: Callable[[], nn.Module] | None = None
    own_modes: bool = False
    owners: Owners = field(default_factory=dict)
    rerun: Callable[[Arguments | None, Modes], Callable[[], str]] | None = None

    def buffers(self) -> Iterator[str]:
        """The first names of all buffers."""
        return (joined(path, name) for path, node in self.nodes.items() for name in node.buffers)

    def extra_states(self) -> dict[str, Any]:
        """The extra states of all submodules, by their names in state dicts."""
        nodes = {**self.nodes, **{path: self.nodes[first] for path, first in self.aliases.items()}}
        return {joined(path, EXTRA): node.extra for path, node in nodes.items() if node.extra is not NO_STATE}


def surface_of(
    module: nn.Module, original: Callable[[], nn.Module], example: Arguments, *, live: bool = True
) -> Surface:
    """The surface of a module.

    Args:
        original: gives the module again; it is not kept.
        example: the arguments of a call.
        live: the module itself is the original, and stays.
    """
    nodes, aliases, first = dict[str, Node](), dict[str, str](), dict[int, str]()
    for path, sub in module.named_modules(remove_duplicate=False):
        if (known := first.setdefault(id(sub), path)) == path:
            names = (_there(sub._parameters), _there(sub._buffers), _there(sub._modules))
            nodes[path] = Node(type(sub), dict(_attributes(sub)), *names, _text(sub), _extra_state(sub, module))
        else:
            aliases[path] = known
    return Surface(
        nodes,
        aliases,
        modes_of(module),
        calling_of(module.forward, *example),
        {name: dict(_marks(one)) for name, one in module.named_parameters(remove_duplicate=False)},
        original,
        any(has_own_modes(sub) for sub in module.modules()),
        owners_of(module, live=live),
    )


def joined(*names: str) -> str:
    """Names as one, with dots."""
    return ".".join(filter(None, names))


def has_own_modes(module: nn.Module) -> bool:
    """True if its `train()` or `eval()` is not that of any module."""
    names = ("train", "eval")
    return any(name in vars(module) or getattr(type(module), name) is not getattr(nn.Module, name) for name in names)


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


def set_modes(module: nn.Module, modes: Modes) -> None:
    """Put exactly these submodules into training mode."""
    for path, sub in module.named_modules(remove_duplicate=False):
        sub.training = path in modes


def own_classes(kind: type[Any]) -> tuple[type[Any], ...]:
    """A class of modules and its bases without what all modules are."""
    return tuple(one for one in kind.__mro__ if one not in nn.Module.__mro__)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes of the module and of its classes; methods and properties are none."""
    first: dict[str, Any] = {}
    for kind in reversed(own_classes(type(module))):
        first.update({name: value for name, value in vars(kind).items() if not name.startswith("__")})
    for name, value in first.items():
        if isinstance(value, type) or not (callable(value) or hasattr(value, "__get__")):
            yield name, value
    for name, value in vars(module).items():
        if name not in STANDARD:
            yield name, HELD if holds_tensors(value) else value
    held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module._modules)
    yield from ((name, None) for table in held for name, one in table.items() if one is None)


def _there(held: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name, one in held.items() if one is not None)


def _marks(parameter: Tensor) -> Iterator[tuple[str, Any]]:
    """What a user has written on a parameter."""
    for name, value in vars(parameter).items():
        if not (name.startswith(OUR_MARK) or holds_tensors(value)):
            yield name, value


def _text(module: nn.Module) -> str:
    try:
        return module.extra_repr()
    except Exception:  # noqa: BLE001 - the user's code, on a module that may have no values
        return ""


def _extra_state(module: nn.Module, root: nn.Module) -> Any:
    """The extra state of a module as it is now, if it does not look at parameters and buffers."""
    if type(module).get_extra_state is nn.Module.get_extra_state:
        return NO_STATE
    ours = {one.untyped_storage()._cdata for one in (*root.parameters(), *root.buffers())}
    try:
        found = copy.deepcopy(state := module.get_extra_state())
    except Exception:  # noqa: BLE001 - the user's code, on a module that may have no values
        return HELD
    tensors = [one for one in pytree.tree_leaves(state) if isinstance(one, Tensor)]
    return HELD if any(one.is_meta or one.untyped_storage()._cdata in ours for one in tensors) else found

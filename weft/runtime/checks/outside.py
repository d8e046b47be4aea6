"""Outside: what forward reads besides its inputs is as it was when the program was made, or the next call is refused.

In: the names that forward reads (`program/reads.py`), and the attributes of the original's submodules. Out: what was
changed since, from what to what, and the line that reads it. Looked at are globals, attributes of modules, of their
classes and of plain objects, default arguments, closures, what containers hold, environment variables, torch's default
dtype, tensors (another one, or changed in place), and whether parameters require a gradient.

Asked in every call: objects are compared by identity, all names of one owner at once; values are looked at where
that fails. An equal number or word is the same. What cannot be compared so (large containers, objects of other
libraries) is known by identity alone.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import call, is_, itemgetter
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weft.runtime.program.reads import Reads

DEPTH, LENGTH = 4, 256
"""Of what is looked into: how deep, and how long a container may be."""
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
DEFINED = (FunctionType, property, classmethod, staticmethod, type, ModuleType)
"""What stands under a name because it is defined there."""
OTHERS = frozenset(sys.stdlib_module_names) | {"torch", "numpy"}
"""Packages whose objects are not looked into."""

INSTALLED, LIBRARY = f"{os.sep}site-packages{os.sep}", sysconfig.get_path("stdlib") + os.sep

Owners = Mapping[str, tuple[type, Mapping[str, Any]]]
"""Of each submodule, by path: its class, and its attributes, live if somebody else holds it."""
STANDARD = frozenset(vars(nn.Module()))


class _Attributes:
    """The attributes of an object without `__dict__`, looked up as in a dict."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name, None)
        except ValueError:  # an empty cell
            return None


@dataclass
class _Space:
    """Names of one owner, and the objects that they stood for."""

    space: Any
    names: tuple[str, ...]
    labels: tuple[str, ...]
    places: tuple[str, ...]

    @property
    def get(self) -> Callable[[Any], Any]:
        """Looks them all up at once, in C; a KeyError if one is gone."""
        return itemgetter(*self.names)

    def difference(self, held: Any) -> str:
        """What is another one than it was."""
        before = held if len(self.names) > 1 else (held,)
        for name, label, place, old in zip(self.names, self.labels, self.places, before, strict=True):
            try:
                new = self.space[name]
            except KeyError:
                return f"{label} was {_shown(old)} when the program was made and is gone, {_read_at(place)}"
            if not is_equal(old, new):
                return _told(label, _shown(old), _shown(new), place)
        return ""


@dataclass
class _Absent:
    """Names that an object has from its class, and might get of its own."""

    space: Mapping[str, Any]
    names: frozenset[str]
    label: str
    places: Mapping[str, str]

    def is_same(self) -> bool:
        return self.names.isdisjoint(self.space)

    def difference(self) -> str:
        name = min(self.names & self.space.keys())
        return f"{self.label}{name} was set to {_shown(self.space[name])}, {_read_at(self.places[name])}"


@dataclass
class _Content:
    """A container, and what it held."""

    container: Any
    length: int
    held: tuple[Any, ...]
    text: str
    label: str
    place: str

    def is_same(self) -> bool:
        return len(self.container) == self.length and all(map(is_, _flat(self.container), self.held))

    def difference(self) -> str:
        now = tuple(_flat(self.container))
        if len(now) == len(self.held) and all(map(is_equal, self.held, now)):
            self.held = now
            return ""
        return _told(self.label, self.text, _shown(self.container), self.place)


@dataclass
class _Version:
    """A tensor, and how often it had been changed in place."""

    tensor: Tensor
    held: int
    label: str
    place: str

    def is_same(self) -> bool:
        return _version(self.tensor) == self.held

    def difference(self) -> str:
        return f"the tensor {self.label} was changed in place since the program was made, {_read_at(self.place)}"


@dataclass
class _Answer:
    """What a question gave."""

    ask: Callable[[], Any]
    held: Any
    label: str
    place: str

    def is_same(self) -> bool:
        return bool(self.ask() == self.held)

    def difference(self) -> str:
        return _told(self.label, repr(self.held), repr(self.ask()), self.place)


class Outside:
    """What forward reads, as it is now.

    Args:
        owners: the submodules of the original.
        parameters: by name, those that tell whether a tensor requires a gradient.
    """

    def __init__(self, reads: Reads, owners: Owners, parameters: Mapping[str, Tensor] | None = None) -> None:
        self._places, self._seen, self._classes = dict(reads.names), set[int](), set[type]()
        self._spaces: list[_Space] = []
        self._watched: list[_Absent | _Content | _Version | _Answer] = []
        self._kept: list[Any] = []
        self.names, self.globals = set[str](), set[tuple[str, str]]()
        """Those that stand for something."""
        for path, (kind, attributes) in owners.items():
            self._module(path, kind, attributes)
        for module, name, place in reads.globals:
            self._global(module, name, place)
        for name, place in reads.environ:
            self._ask(lambda name=name: os.environ.get(name), f"the environment variable {name}", place)  # type: ignore[misc]
        if reads.default_dtype:
            self._ask(torch.get_default_dtype, "torch's default dtype", reads.default_dtype)
        for place, names in reads.gradients if parameters is not None else ():
            assert parameters is not None
            if held := [parameters[name] for name in names if name in parameters]:
                label = f"requires_grad of {names[0]}" + (f" and {len(names) - 1} others" if names[1:] else "")
                self._ask(lambda held=held: any(one.requires_grad for one in held), label, place)  # type: ignore[misc]
        del self._seen, self._kept
        # looked up in one go: there is one for each layer of the model
        self._getters = [one.get for one in self._spaces]
        self._dicts = [one.space for one in self._spaces]
        self._held = list(map(call, self._getters, self._dicts))

    def changed(self) -> str:
        """What is not as it was; "" if all is. Asked in every call."""
        for one in self._watched:
            if not one.is_same() and (found := one.difference()):
                return found
        try:
            if list(map(call, self._getters, self._dicts)) == self._held:
                return ""
        except (KeyError, RuntimeError, ValueError):
            # gone; or what is no plain value, and is another one
            pass
        differences = (one.difference(held) for one, held in zip(self._spaces, self._held, strict=True))
        return next(filter(None, differences), "")

    def _ask(self, ask: Callable[[], Any], label: str, place: str) -> None:
        self._watched.append(_Answer(ask, ask(), label, place))

    def _module(self, path: str, kind: type, attributes: Mapping[str, Any]) -> None:
        """A submodule: what it holds, and what its classes do where it does not."""
        self._instance(kind, attributes, f"{path}." if path else "", DEPTH, STANDARD)
        if (forward := _of_class(kind, "forward")) is not None:
            self._function(forward, DEPTH)

    def _instance(
        self, kind: type, attributes: Mapping[str, Any], label: str, depth: int, but: Collection[str] = ()
    ) -> None:
        """What an object holds, and what its classes do where it does not."""
        self._space(attributes, [name for name in self._places if name in attributes and name not in but], label, depth)
        inherited = {name: _of_class(kind, name) for name in self._places if name not in attributes}
        names = frozenset(name for name, one in inherited.items() if one is not None and not isinstance(one, DEFINED))
        if names:
            self._watched.append(_Absent(attributes, names, label, self._places))
        self._class(kind, depth)

    def _global(self, module: str, name: str, place: str) -> None:
        space = vars(sys.modules[module]) if module in sys.modules else {}
        if name not in space:
            return
        self.globals.add((module, name))
        value, label = space[name], f"{module}.{name}"
        if not isinstance(value, DEFINED):
            self._spaces.append(_Space(space, (name,), (label,), (place,)))
        if isinstance(value, ModuleType):
            self._defined(vars(value), f"{label}.", DEPTH)
        self._look(value, label, place, DEPTH)

    def _space(self, space: Any, names: Sequence[str], label: str, depth: int) -> None:
        """Attributes, and what stands in them."""
        self.names.update(names)
        if names:
            places = tuple(self._places[name] for name in names)
            self._spaces.append(_Space(space, tuple(names), tuple(label + name for name in names), places))
        for name in names:
            self._look(space[name], label + name, self._places[name], depth - 1)

    def _defined(self, space: Mapping[str, Any], label: str, depth: int) -> None:
        """Attributes of a module or class: what is defined there stays."""
        names = [name for name in self._places if name in space]
        self._space(space, [name for name in names if not isinstance(space[name], DEFINED)], label, depth)
        self.names.update(names)
        for name in names:
            self._look(space[name], label + name, self._places[name], depth - 1)

    def _look(self, value: Any, label: str, place: str, depth: int) -> None:
        """Into a value, where it may change and stay the same object."""
        if depth <= 0 or isinstance(value, (*PLAIN, nn.Module, ModuleType)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, Tensor):
            self._watched.append(_Version(value, _version(value), label, place))
        elif isinstance(value, CONTAINERS):
            self._container(value, label, place, depth)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, FunctionType | MethodType | property | classmethod | staticmethod):
            self._function(value, depth)
        elif isinstance(value, SimpleNamespace | Namespace) or type(value).__module__.partition(".")[0] not in OTHERS:
            self._object(value, f"{label}.", depth)

    def _container(self, value: Any, label: str, place: str, depth: int) -> None:
        if len(value) > LENGTH:
            return
        if not isinstance(value, tuple | frozenset):
            self._watched.append(_Content(value, len(value), tuple(_flat(value)), _shown(value), label, place))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            self._look(item, f"{label}[{key!r}]", place, depth - 1)

    def _object(self, value: Any, label: str, depth: int) -> None:
        own = getattr(value, "__dict__", None)
        if own is not None:
            self._instance(type(value), own, label, depth)
            return
        slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
        self._space(_Attributes(value), [name for name in self._places if name in slots], label, depth)

    def _class(self, kind: type, depth: int) -> None:
        """Of a class and those that it is made from: attributes that are read."""
        for one in kind.__mro__:
            if one not in self._classes and _is_own(one.__module__):
                self._classes.add(one)
                self._defined(vars(one), f"{one.__qualname__}.", depth)

    def _function(self, value: Any, depth: int) -> None:
        """Default arguments, and what a function closes over."""
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if not isinstance(function, FunctionType) or not _is_own(function.__module__):
            return
        name, code = function.__qualname__, function.__code__
        place = f"{code.co_filename}:{code.co_firstlineno}"
        for default in (function.__defaults__, function.__kwdefaults__):
            self._look(default, f"the default arguments of {name}", place, depth - 1)
        if function.__defaults__ or function.__kwdefaults__:
            labels = (f"the default arguments of {name}",) * 2
            self._spaces.append(_Space(_Attributes(function), ("__defaults__", "__kwdefaults__"), labels, (place,) * 2))
        for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._cell(cell, f"{free} (which {name} closes over)", place, depth)

    def _cell(self, cell: CellType, label: str, place: str, depth: int) -> None:
        held = _Attributes(cell)
        value = held["cell_contents"]
        if not isinstance(value, DEFINED):
            self._spaces.append(_Space(held, ("cell_contents",), (label,), (place,)))
        self._look(value, label, place, depth - 1)


def owners_of(module: nn.Module, *, live: bool = True) -> Owners:
    """The submodules of a module.

    Args:
        live: somebody else holds the module, and may change it; else what holds tensors is let go.
    """
    return {
        path: (type(sub), vars(sub) if live else {key: one for key, one in vars(sub).items() if not _holds_tensor(one)})
        for path, sub in module.named_modules()
    }


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor | nn.Module) for leaf in pytree.tree_leaves(value))


def is_equal(one: Any, other: Any) -> bool:
    """Whether forward would do the same with both: the same object, or equal numbers or words.

    >>> is_equal(float("nan"), float("nan")), is_equal(1, True), is_equal(1.5, 1.5)
    (True, False, True)
    """
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, (*PLAIN, tuple, frozenset)):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return repr(one) == repr(other) if isinstance(one, float | complex) else bool(one == other)


def _flat(container: Any) -> Iterator[Any]:
    """All that it holds; a dict's values, then its keys. Of a set in an order of its own, which stays while it does."""
    yield from container.values() if isinstance(container, dict) else container
    yield from container if isinstance(container, dict) else ()


def _of_class(kind: type, name: str) -> Any:
    """What a class has under a name, in the user's part of it."""
    return next((vars(one)[name] for one in kind.__mro__ if name in vars(one) and _is_own(one.__module__)), None)


@cache
def _is_own(module: str) -> bool:
    """Whether a module is the user's own: neither installed nor Python's nor ours."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module == "__main__"
    return INSTALLED not in file and not file.startswith(LIBRARY) and module.partition(".")[0] != "weft"


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _shown(value: Any) -> str:
    """A value, shortened."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, CONTAINERS) and _holds_tensor(value):
        return f"a {type(value).__name__} of {len(value)}, tensors among them"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _told(label: str, old: str, new: str, place: str) -> str:
    same = f"is another one than when the program was made ({new})"
    changed = same if old == new else f"was {old} when the program was made and is {new}"
    return f"{label} {changed}, {_read_at(place)}"


def _read_at(place: str) -> str:
    return f"and forward reads it at {place}"

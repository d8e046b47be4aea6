"""What forward reads and changes outside its module: globals, class attributes, default arguments, closures.

Enters: a module, before its forward runs. Leaves: the names of what a forward has changed; a counter that it counts on
would be frozen into the program. Looked at are the files that the forwards are written in, and all files of the user's
own. Caches of tensors (a dict, `functools.lru_cache`) are no state of that kind: what a trace puts there are fake
tensors, and they are taken out again, so that the next forward fills the cache anew.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import _lru_cache_wrapper, partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from weft.capture.source import is_users, package_of
from weft.capture.tracing.fingerprint import CONTAINERS, PLAIN, Containers, fingerprint

COUNTED = (itertools.count, *CONTAINERS)
DEPTH = 3
"""Of containers that are looked into."""


class Surroundings:
    """The state around a module before its forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._spaces = list(_namespaces(module))
        self._caches = [(one, one.cache_info().misses) for _, _, space in self._spaces for one in _caches(space)]
        self._held = {label: _seen(space) for label, _, space in self._spaces}
        self._containers = Containers(value for space in self._held.values() for value, _ in space.values())

    def again(self) -> Surroundings:
        """The state now."""
        return Surroundings(self._module)

    def changed(self) -> tuple[str, Callable[[], Any]] | None:
        """The name of what is not as it was and holds no cache, and what gives its fingerprint; None if all is."""
        for label, _, space in self._spaces:
            for name, (value, print_) in self._held[label].items():
                now = space.get(name, value)
                if type(now) not in (*PLAIN, *COUNTED) or (now is value and self._is_cache(value)):
                    continue
                if _print(now) != print_:
                    return (f"{label}.{name}" if label else name), partial(_printed, space, name)
        return None

    def filled(self) -> set[str]:
        """The names of containers that hold something else than they did."""
        return {
            name
            for label, _, _ in self._spaces
            for name, (value, print_) in self._held[label].items()
            if isinstance(value, CONTAINERS) and _print(value) != print_
        }

    def clear_caches(self) -> None:
        """Take out what was put into caches; functions cache nothing of what they cached meanwhile."""
        for held, copy in self._containers:
            if isinstance(held, dict) and self._is_cache(held):
                for key in [key for key in held if key not in copy and _holds_tensor(held[key])]:
                    del held[key]
        for one, before in self._caches:
            if one.cache_info().misses != before:
                one.cache_clear()

    def restore(self) -> None:
        """Give plain values and containers back what they held."""
        for label, owner, space in self._spaces:
            for name, (value, print_) in self._held[label].items():
                if owner is not None and type(value) in PLAIN and _print(space.get(name, value)) != print_:
                    setattr(owner, name, value)
        self._containers.restore()
        self.clear_caches()

    def _is_cache(self, held: Any) -> bool:
        """True for a dict whose old entries are as they were, and for a set that only grew."""
        copy = self._containers.before(held)
        if isinstance(held, dict):
            return all(key in held and _print(held[key]) == _print(value) for key, value in copy.items())
        return isinstance(held, set) and copy <= held


Space = Mapping[str, Any]
Owner = ModuleType | type | None


def _namespaces(module: nn.Module) -> Iterator[tuple[str, Owner, Space]]:
    """Of the files that forwards are written in: modules, classes of sub-modules, defaults and closures of methods."""
    kinds = {kind for sub in module.modules() for kind in type(sub).__mro__ if _is_users(kind)}
    files = {str(getattr(sys.modules[kind.__module__], "__file__", "")) for kind in kinds}
    for name, found in list(sys.modules.items()):
        file = getattr(found, "__file__", None) or ""
        if isinstance(found, ModuleType) and (file in files or (file and is_users(file) and not package_of(file))):
            yield name, found, vars(found)
    for kind in sorted(kinds, key=lambda one: (one.__module__, one.__qualname__)):
        yield kind.__qualname__, kind, vars(kind)
        for name, held in vars(kind).items():
            function = getattr(held, "__func__", getattr(held, "fget", held))  # of a static method, of a property
            if isinstance(function, FunctionType):
                yield f"{kind.__qualname__}.{name}", None, _bound(function)


def _is_users(kind: type) -> bool:
    """True for a class of the user's, also of one at a prompt, which lies in no file."""
    found = sys.modules.get(kind.__module__)
    file = getattr(found, "__file__", None)
    return found is not None and (kind.__module__ == "__main__" if file is None else is_users(file))


def _bound(function: FunctionType) -> dict[str, Any]:
    """Values that a function carries with it."""
    defaults = {f"default {at}": value for at, value in enumerate(function.__defaults__ or ())}
    full = [cell for cell in function.__closure__ or () if _is_full(cell)]
    cells = {f"closure {at}": cell.cell_contents for at, cell in enumerate(full)}
    return {**defaults, **(function.__kwdefaults__ or {}), **cells}


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - asks whether it holds something
    except ValueError:
        return False
    return True


def _seen(space: Space) -> dict[str, tuple[Any, Any]]:
    return {name: (value, _print(value)) for name, value in space.items() if _is_seen(name, value)}


def _is_seen(name: str, value: Any) -> bool:
    return type(value) in (*PLAIN, *COUNTED) and not (name.startswith("__") and name.endswith("__"))


def _caches(space: Space) -> Iterator[Any]:
    return (value for value in list(space.values()) if isinstance(value, _lru_cache_wrapper))


def _printed(space: Space, name: str) -> Any:
    return _print(space.get(name))


def _print(value: Any) -> Any:
    """Other objects than values and containers of them are known by identity."""
    return fingerprint(value, DEPTH, objects=False)


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))

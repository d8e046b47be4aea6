"""What forward reads and changes outside its module: globals, class attributes, default arguments, closures.

Enters: a module, before its forward runs. Leaves: the names of what a forward has changed; a counter that it counts on
would be frozen into the program. Looked at are the files that the forwards are written in, all files of the user's
own, and the functions, classes and objects there that methods of the module lead to by name. Caches of tensors (a
dict, `functools.lru_cache`) are no state of that kind: what a trace puts there are fake tensors, and they are taken out
again, so that the next forward fills the cache anew. They must be made from constants alone (`caches.py`).
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import _lru_cache_wrapper, partial
from operator import is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from weft.capture.source import is_own, is_users
from weft.capture.tracing.fingerprint import CONTAINERS, PLAIN, Containers, fingerprint, of_kinds

HOOK = "the hook"
HOOK_REMEDY = "remove it before (handle.remove()), and return from forward what it collects"
SEEN = PLAIN | {itertools.count, *CONTAINERS}
"""Kinds of values that are looked at."""
MAY_CACHE = (_lru_cache_wrapper, staticmethod, classmethod, MethodType, property)
"""A function that caches, and what may be made of one."""
DEPTH = 3
"""Of containers that are looked into."""


class Surroundings:
    """The state around a module before its forward.

    Args:
        besides: functions and classes that its forward leads to, if not by name.
    """

    def __init__(self, module: nn.Module, besides: Sequence[Any] = ()) -> None:
        self._module, self._besides = module, besides
        self._spaces = [(*one, _seen(one[2])) for one in _namespaces(module, besides)]
        self._caches = [(one, _misses(one)) for _, _, space, _ in self._spaces for one in _caches(space)]
        self._containers = Containers((value for *_, held in self._spaces for value in held.values()), DEPTH)
        self._sizes = self._sizes_now()

    def again(self) -> Surroundings:
        """The state now."""
        is_same = self._containers.is_same() and self._sizes == self._sizes_now()
        is_same = is_same and not any(_is_rebound(space, held) for _, _, space, held in self._spaces)
        return self if is_same else Surroundings(self._module, self._besides)

    def _sizes_now(self) -> list[int]:
        """How much there is to look at."""
        return [len(sys.modules), *(len(space) for _, _, space, _ in self._spaces)]

    def changed(self) -> tuple[str, Callable[[], Any]] | None:
        """The name of what is not as it was and holds no cache, and what gives its fingerprint; None if all is."""
        for label, _, space, name, value in self._changed():
            now = space.get(name, value)
            if type(now) in SEEN and (now is not value or not self._is_cache(value)):
                return (f"{label}.{name}" if label else name), partial(_printed, space, name)
        return None

    def filled(self) -> set[str]:
        """The names of containers that hold something else than they did."""
        return {name for *_, name, value in self._changed(rebound=False) if isinstance(value, CONTAINERS)}

    def _changed(self, *, rebound: bool = True) -> Iterator[tuple[str, Any, Space, str, Any]]:
        """Names, and where they are, of what has another value, or, unless `rebound`, holds something else."""
        is_same = self._containers.is_same()
        for label, owner, space, held in self._spaces:
            if is_same and not (rebound and _is_rebound(space, held)):
                continue
            for name, value in held.items():
                now = space.get(name, value) if rebound else value
                # the very objects in the very containers: what most processes are full of
                if (now is not value or not (is_same or type(value) in PLAIN)) and _print(now) != self._before(value):
                    yield label, owner, space, name, value

    def _before(self, value: Any) -> Any:
        """The fingerprint that a value had."""
        return fingerprint(value, DEPTH, objects=False, contents=self._containers.before)

    def kept(self) -> list[tuple[str, torch.Tensor]]:
        """Fake tensors that were put into caches, each with the name of the cache."""
        values = [
            (f"{label}.{name}" if label.startswith(HOOK) else name, value)
            for label, *_, held in self._spaces
            for name, value in held.items()
        ]
        filled = [] if self._containers.is_same() else [(name, value) for name, value in values if type(value) is dict]
        dicts = [(name, list(self._new_within(value))) for name, value in filled]
        functions = [(one.__name__, gc.get_referents(one)) for one, misses in self._caches if _misses(one) != misses]
        # what a hook keeps is for others, who would find it in its object
        changed = (one for one in self._changed() if one[0].startswith(HOOK))
        hooks = [(f"{label}.{name}", space.get(name)) for label, _, space, name, _ in changed]
        leaves = ((name, leaf) for name, held in (*dicts, *functions, *hooks) for leaf in pytree.tree_leaves(held))
        return [(name, leaf) for name, leaf in leaves if isinstance(leaf, FakeTensor)]

    def clear_caches(self) -> None:
        """Take out what was put into caches; functions cache nothing of what they cached meanwhile."""
        for held, _ in self._containers:
            tensors = [key for key, one in self._new(held).items() if _holds_tensor(one)]
            if tensors and self._is_cache(held):
                for key in tensors:
                    del held[key]
        for at, (one, before) in enumerate(self._caches):
            if _misses(one) != before:
                one.cache_clear()
                # it counts anew
                self._caches[at] = one, 0

    def _new(self, held: Any) -> dict[Any, Any]:
        """What was put into a dict."""
        before = self._containers.before(held)
        return {key: held[key] for key in held.keys() - before.keys()} if isinstance(held, dict) else {}

    def _new_within(self, held: Any) -> Iterator[Any]:
        """The same, and what was put into dicts in it."""
        if isinstance(held, dict) and held is not (before := self._containers.before(held)):
            yield from self._new(held).values()
            for one in before.values():
                yield from self._new_within(one)

    def restore(self) -> None:
        """Give plain values and containers back what they held."""
        for _, owner, _, name, value in self._changed():
            if owner is not None and type(value) in PLAIN:
                setattr(owner, name, value)
        self._containers.restore()
        self.clear_caches()

    def _is_cache(self, held: Any) -> bool:
        """True for a dict whose old entries are as they were, or caches, and for a set that only grew."""
        before = self._containers.before(held)
        if isinstance(held, dict):
            return all(key in held and self._is_kept(held[key], value) for key, value in before.items())
        return isinstance(held, set) and before <= held

    def _is_kept(self, now: Any, value: Any) -> bool:
        return _print(now) == self._before(value) or (now is value and self._is_cache(now))


Space = Mapping[str, Any]
Found = tuple[str, Any, Space]
"""A label, what its values are attributes of (None: of nothing), and the values."""


def _namespaces(module: nn.Module, besides: Sequence[Any]) -> Iterator[Found]:
    """Of the files that forwards are written in: modules, classes of sub-modules, and what their methods lead to."""
    kinds = {kind for sub in module.modules() for kind in type(sub).__mro__ if _is_users(kind)}
    files = {str(getattr(sys.modules[kind.__module__], "__file__", "")) for kind in kinds}

    def is_theirs(file: str) -> bool:
        return file in files or bool(file and is_own(file))

    for name, found in list(sys.modules.items()):
        if isinstance(found, ModuleType) and is_theirs(getattr(found, "__file__", None) or ""):
            yield name, found, vars(found)
    known: set[int] = set()
    waiting: list[tuple[str, Any]] = [(kind.__qualname__, kind) for kind in sorted(kinds, key=repr, reverse=True)]
    waiting += ((_name_of(one), each) for one in _hooks(module) for each in _unwrapped(one))
    waiting += ((one.__qualname__, one) for one in besides)
    while waiting:
        label, value = waiting.pop()
        if id(value) not in known and _is_of(value, is_theirs):
            known.add(id(value))
            carried, led = _carried(label, value)
            yield carried
            waiting += led


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Forward hooks of the sub-modules: they run with forward."""
    for sub in module.modules():
        yield from (*vars(sub)["_forward_pre_hooks"].values(), *vars(sub)["_forward_hooks"].values())


def _name_of(hook: Any) -> str:
    return f"{HOOK} {getattr(hook, '__qualname__', type(hook).__qualname__)}"


def _carried(label: str, value: Any) -> tuple[Found, list[tuple[str, Any]]]:
    """What a class, a function or an object carries, and what it leads to."""
    led: Iterator[tuple[str, Any]] = iter(())
    space = vars(value)
    if isinstance(value, FunctionType):
        space, led = _bound(value), _named(value.__code__, value.__globals__)
    held = [(f"{label}.{name}", one) for name, one in space.items()]
    found = (label, None if isinstance(value, FunctionType) else value, space)
    return found, [(name, one) for name, each in (*led, *held) for one in _unwrapped(each)]


def _unwrapped(value: Any) -> tuple[Any, ...]:
    """The function, and the object, of a method; the function of a property."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        return value.__func__, getattr(value, "__self__", None)
    return (value.fget,) if isinstance(value, property) else (value,)


def _is_of(value: Any, is_theirs: Callable[[str], bool]) -> bool:
    """True for a function or class that is written in these files, and an object of such a class."""
    kind = value if isinstance(value, type | FunctionType) else type(value)
    if isinstance(value, nn.Module | torch.Tensor | ModuleType) or not hasattr(value, "__dict__"):
        return False
    found = sys.modules.get(kind.__module__ or "")
    return found is not None and kind.__module__ != "builtins" and is_theirs(getattr(found, "__file__", None) or "")


def _named(code: CodeType, around: Space) -> Iterator[tuple[str, Any]]:
    """Globals that a function names, and what it names of modules among them."""
    for name in code.co_names:
        value = around.get(name)
        yield name, value
        if isinstance(value, ModuleType):
            yield from ((f"{name}.{one}", vars(value).get(one)) for one in code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _named(inner, around)


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


def _is_rebound(space: Space, held: Space) -> bool:
    """Whether a name stands for another object than it did."""
    return not all(map(is_, map(space.get, held), held.values()))


def _seen(space: Space) -> dict[str, Any]:
    found = of_kinds(list(space.items()), space.values(), SEEN)
    return {name: value for name, value in found if not (name.startswith("__") and name.endswith("__"))}


def _caches(space: Space) -> Iterator[Any]:
    values = list(space.values())
    kinds = {kind for kind in set(map(type, values)) if issubclass(kind, MAY_CACHE)}
    found = (one for value in of_kinds(values, values, kinds) for one in _unwrapped(value))
    return (one for one in found if isinstance(one, _lru_cache_wrapper))


def _misses(cache: Any) -> int:
    return int(cache.cache_info().misses)


def _printed(space: Space, name: str) -> Any:
    return _print(space.get(name))


def _print(value: Any) -> Any:
    """Other objects than values and containers of them are known by identity."""
    return fingerprint(value, DEPTH, objects=False)


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))

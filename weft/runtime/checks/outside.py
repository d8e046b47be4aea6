"""Outside: what forward reads besides its inputs is as it was when the program was made, or the next call is refused.

In: the names that forward reads (`program/reads.py`), and the attributes of the original's submodules. Out: what was
changed since, from what to what, and the line that reads it. Looked at are globals, attributes of modules, of their
classes and of plain objects, functions and methods of the user's and their code, default arguments, closures, what
containers and small arrays hold, environment variables, settings of torch, tensors (another one, or changed in place),
also those of modules that the model does not own, and whether parameters require a gradient.

Asked in every call: objects are compared by identity, all of them at once (`Facts`); values are looked at where that
fails. An equal number or word is the same. Elements of tensors and much that is long are looked at in the first
calls and then rarely. What cannot be compared so (large containers, objects of other libraries) is known by identity
alone.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import _lru_cache_wrapper, cache, partial
from operator import attrgetter, call
from threading import local
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from weft.runtime.checks.watched import (
    ASKS_GRADIENT,
    CONTAINERS,
    MAPPINGS,
    PLAIN,
    Absent,
    Answer,
    Attributes,
    Content,
    Fact,
    Facts,
    Memory,
    OfThread,
    Space,
    Tensors,
    holds_tensor,
    looked_up,
    views_of,
)
from weft.runtime.program.reads import ANY, Reads, kind_of

DEPTH, LENGTH = 6, 256
"""Of what is looked into: how deep, and how long a container may be."""
ENTRIES, BYTES, SMALL = 2048, 65536, 1024
"""What is looked at: so many entries of containers in every call, arrays of so many bytes, small ones in every call."""
LOOKS, RARELY = 8, 64
"""The first calls, in which all is looked at, and how often afterwards."""
FUNCTIONS = (FunctionType, property, classmethod, staticmethod)
STAY = (type, ModuleType)
"""What is not expected to be another one under its name."""
DEFINED = (*FUNCTIONS, *STAY)
"""What stands under a name because it is defined there."""
OTHERS = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "weft"}
"""Packages whose objects are not looked into."""
HOLDERS: Sequence[tuple[Any, tuple[str, ...]]] = (
    (ChainMap, ("maps",)),
    ((UserDict, UserList), ("data",)),
    (partial, ("func", "args", "keywords")),
    (_lru_cache_wrapper, ("__wrapped__",)),
)
"""Objects of the standard library that hold others, and where."""

NUMPY = ("numpy", "ndarray")
INSTALLED, LIBRARY = f"{os.sep}site-packages{os.sep}", sysconfig.get_path("stdlib") + os.sep

Owners = Mapping[str, tuple[type, Mapping[str, Any]]]
"""Of each submodule, by path: its class, and its attributes, live if somebody else holds it."""
STANDARD = frozenset(vars(nn.Module()))
_code = attrgetter("__code__")


class Outside:
    """What forward reads, as it is now.

    Args:
        owners: the submodules of the original.
        parameters: by name, those that tell whether a tensor requires a gradient.
        shown: by path, attributes of what shows the submodules, the names that it shows of the original, and those of
            the runtime's.
        rerun: tells where forward does something else than when the program was made, whatever it reads.
    """

    def __init__(
        self,
        reads: Reads,
        owners: Owners,
        parameters: Mapping[str, Tensor] | None = None,
        shown: Mapping[str, tuple[Mapping[str, Any], Collection[str], Collection[str]]] | None = None,
        rerun: Callable[[], str] = str,
    ) -> None:
        self._rerun = rerun
        self._places = {**{name: place for _, name, place in reads.asked}, **dict(reads.names)}
        self._names, self._asked_of = list(dict(reads.names)), cache(reads.asked_of)
        self._seen, self._classes, self._kinds = set[int](), set[type](), set[type]()
        self._used = None if reads.tensors is None else frozenset(reads.tensors)
        self._spaces: list[Space] = []
        self._watched: list[Content | Memory | Answer] = []
        self._rare: list[Content | Memory] = []
        self._absent: list[Absent] = []
        self._functions: list[tuple[FunctionType, CodeType]] = []
        self._equal, self._same = list[Fact](), list[Fact]()
        self._tensors, self._entries, self._calls = Tensors(), 0, -1
        self._kept: list[Any] = []
        self.names, self.globals = set[str](), set[tuple[str, str]]()
        """Those that stand for something."""
        self.tensors: dict[str, Tensor] = {}
        """Of modules that the model does not own, by label."""
        self.getters: dict[str, str] = {}
        """Names that an `attrgetter` reads, and where that is read."""
        self._own = {id(one) for _, held in owners.values() for one in (held, *_tensors_in(held))}
        self._own.update(map(id, (parameters or {}).values()))
        for path, (kind, attributes) in owners.items():
            self._module(path, kind, attributes)
        for path, (attributes, names, ours) in (shown or {}).items():
            of = kind_of(owners[path][0]) if path in owners else ANY
            self._lacks(attributes, f"{path}." if path else "", of, self._places.keys() & names, ours)
        for module, name, place in reads.globals:
            self._global(module, name, place)
        for module in {kind for kind, _, _ in reads.asked if kind in sys.modules}:
            self._lacks(vars(sys.modules[module]), f"{module}.", module)
        self._questions(reads, parameters)
        self._tensors.seal()
        if self._rare or self._tensors.named:
            self._equal.append((call, self._changed_rarely))
        if rerun is not str:
            self._equal.append((call, self._runs_again))
        self._same += looked_up((one.space, one.names) for one in self._spaces)
        self.facts = Facts([*self._equal, *self._tensors.asked()], self._same)
        """What is looked at in every call."""
        del self._seen, self._kept, self._equal, self._same

    def _questions(self, reads: Reads, parameters: Mapping[str, Tensor] | None) -> None:
        """What can be asked again."""
        for name, place in reads.environ:
            self._ask(lambda name=name: os.environ.get(name), f"the environment variable {name}", place)  # type: ignore[misc]
        if reads.default_dtype:
            self._ask(torch.get_default_dtype, "torch's default dtype", reads.default_dtype)
        for place, names in reads.gradients if parameters is not None else ():
            assert parameters is not None
            if held := [parameters[name] for name in names if name in parameters]:
                label = f"{ASKS_GRADIENT}{names[0]}" + (f" and {len(names) - 1} others" if names[1:] else "")
                self._ask(lambda held=held: any(one.requires_grad for one in held), label, place)  # type: ignore[misc]

    def changed(self) -> str:
        """What is not as it was; "" if all is."""
        if self.facts.is_same():
            return ""
        found = next(filter(None, self._differences()), "")
        if not found:
            # other objects, and the same values
            self.facts.note()
        return found

    def _changed_rarely(self) -> str:
        """What is looked at in the first calls and then now and then."""
        self._calls += 1
        if self._calls > LOOKS and self._calls % RARELY:
            return ""
        return next((found for one in (*self._rare, self._tensors) if (found := one.difference())), "")

    def _runs_again(self) -> object:
        """Equal to what was noted if forward does the same: what it does otherwise is never right."""
        return "" if not self._rerun() else object()

    def _differences(self) -> Iterator[str]:
        for watched in (*self._watched, *self._rare, *self._spaces):
            yield watched.difference()
        for function, code in self._functions:
            if function.__code__ is not code:
                yield f"the code of {function.__qualname__} is another one than when the program was made"
        yield self._tensors.difference()
        yield from (one.difference() for one in self._absent)
        yield self._rerun()

    def _ask(self, ask: Callable[[], Any], label: str, place: str) -> None:
        self._watched.append(Answer(ask, ask(), label, place))
        self._equal.append((call, ask))

    def _module(self, path: str, kind: type, attributes: Mapping[str, Any]) -> None:
        """A submodule: what it holds, and what its classes do where it does not."""
        self._instance(kind, attributes, f"{path}." if path else "", DEPTH, STANDARD)
        self._forward(kind)

    def _forward(self, kind: type) -> None:
        owner = next((one for one in kind.__mro__ if "forward" in vars(one)), kind)
        forward = vars(owner).get("forward")
        if not isinstance(forward, FunctionType) or not _is_own(owner.__module__) or id(forward) in self._seen:
            return
        self._seen.add(id(forward))
        self._spaces.append(Space(vars(owner), ("forward",), (f"{owner.__qualname__}.forward",), (_line(forward),)))
        self._function(forward, DEPTH)

    def _instance(
        self, kind: type, attributes: Mapping[str, Any], label: str, depth: int, but: Collection[str] = ()
    ) -> None:
        """What an object holds, and what its classes do where it does not."""
        self._space(attributes, [name for name in self._names if name in attributes and name not in but], label, depth)
        inherited = {name: _of_class(kind, name) for name in self._names if name not in attributes}
        names = [name for name, one in inherited.items() if one is not None and not isinstance(one, STAY)]
        held = [one for key in ("_parameters", "_buffers", "_modules") for one in attributes.get(key, ())]
        self._lacks(attributes, label, kind_of(kind), names, held)
        self._class(kind, depth)

    def _lacks(
        self, space: Mapping[str, Any], label: str, kind: str, names: Collection[str] = (), but: Collection[str] = ()
    ) -> None:
        """Names that are not there, and would be read if they were: of a class, or asked for in vain."""
        places = self._asked_of(kind)
        if absent := frozenset([*names, *places]) - space.keys() - set(but):
            self._absent.append(Absent(space, absent, label, {**self._places, **places}))
            # as many are looked up as there are fewer of
            self._equal.append((space.keys().isdisjoint, absent))

    def _global(self, module: str, name: str, place: str) -> None:
        space = vars(sys.modules[module]) if module in sys.modules else {}
        if name not in space and (name or not space):
            return
        self.globals.add((module, name))
        # without a name it is the module itself that is imported
        value, label = (space[name], f"{module}.{name}") if name else (sys.modules[module], module)
        if not isinstance(value, STAY):
            self._spaces.append(Space(space, (name,), (label,), (place,)))
        if isinstance(value, ModuleType):
            self._defined(vars(value), f"{label}.", DEPTH, own=_is_own(value.__name__))
        self._look(value, label, place, DEPTH)

    def _space(self, space: Any, names: Sequence[str], label: str, depth: int) -> None:
        """Attributes, and what stands in them."""
        self.names.update(names)
        if names:
            places = tuple(self._places[name] for name in names)
            self._spaces.append(Space(space, tuple(names), tuple(label + name for name in names), places))
        for name in names:
            self._look(space[name], label + name, self._places[name], depth - 1)

    def _defined(self, space: Mapping[str, Any], label: str, depth: int, *, own: bool = True) -> None:
        """Attributes of a module or class: what is defined there by others stays."""
        names, stay = [name for name in self._names if name in space], STAY if own else DEFINED
        self._space(space, [name for name in names if not isinstance(space[name], stay)], label, depth)
        self.names.update(names)
        for name in names:
            self._look(space[name], label + name, self._places[name], depth - 1)

    def _look(self, value: Any, label: str, place: str, depth: int) -> None:
        """Into a value, where it may change and stay the same object."""
        if depth <= 0 or isinstance(value, (*PLAIN, ModuleType)) or id(value) in self._seen or id(value) in self._own:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, Tensor):
            self._tensors.add(value, label, place)
        elif isinstance(value, nn.Module):
            self._hidden(value, label, place, depth)
        elif isinstance(value, CONTAINERS):
            self._container(value, label, place, depth)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, (*FUNCTIONS, MethodType)):
            self._function(value, depth)
        elif not self._holder(value, label, place, depth):
            kind = type(value).__module__.partition(".")[0]
            if isinstance(value, SimpleNamespace | Namespace) or kind not in OTHERS:
                self._object(value, f"{label}.", depth)

    def _holder(self, value: Any, label: str, place: str, depth: int) -> bool:
        """Objects of libraries that hold others: whether it is one."""
        for kind, names in HOLDERS:
            if isinstance(value, kind):
                for name in names:
                    self._look(getattr(value, name), f"{label}.{name}", place, depth)
                return True
        if isinstance(value, array | bytearray) or (type(value).__module__, type(value).__name__) == NUMPY:
            self._memory(value, label, place)
        elif isinstance(value, ref):
            self._look(value(), label, place, depth)
        elif isinstance(value, local):
            held, label = vars(value), f"{label}."
            self._space(held, [name for name in self._names if name in held], label, depth)
            self._lacks(held, label, kind_of(value), self._names)
            self.names.update(self._names)
        elif isinstance(value, ContextVar):
            self._spaces.append(Space(OfThread(value), ("value",), (label,), (place,)))
            self._look(value.get(None), label, place, depth - 1)
        elif isinstance(value, attrgetter):
            dotted = value.__reduce__()[1]
            self.getters.update((one, place) for name in dotted for one in name.split("."))
        elif isinstance(value, torch.optim.Optimizer):
            for at, group in enumerate(value.param_groups if "param_groups" in self._names else ()):
                read = [name for name in self._names if name in group and name != "params"]
                self._space(group, read, f"{label}.param_groups[{at}].", depth)
                self.names.add("param_groups")
        else:
            return False
        return True

    def _memory(self, value: Any, label: str, place: str) -> None:
        try:
            size = memoryview(value).nbytes
        except (ValueError, BufferError):  # of a dtype without a name in C
            return
        if size <= BYTES:
            found = Memory.of(value, label, place)
            (self._watched if size <= SMALL else self._rare).append(found)
            self._equal += [(call, found.now)] if size <= SMALL else []

    def _hidden(self, module: nn.Module, label: str, place: str, depth: int) -> None:
        """A module that is not the model's: the tensors of it that forward computes with, and what it reads there."""
        modes, uses, holds = list[tuple[str, nn.Module]](), False, False
        for path, sub in module.named_modules():
            if id(vars(sub)) in self._own or type(sub).__module__.startswith("weft."):
                continue
            if "training" in self._names and _reads_mode(type(sub)):
                modes.append((f"{label}.{path}." if path else f"{label}.", sub))
            prefix, some = f"{label}.{path}." if path else f"{label}.", False
            for held in (sub._parameters, sub._buffers):
                found = {name: one for name, one in held.items() if one is not None and id(one) not in self._own}
                names = tuple(name for name in found if self._used is None or prefix + name in self._used)
                labels = tuple(prefix + name for name in names)
                if names:
                    some = True
                    self._spaces.append(Space(held, names, labels, (place,) * len(names)))
                for name, one in zip(names, labels, strict=True):
                    self.tensors[one] = found[name]
                    self._look(found[name], one, place, depth)
            if some or not path:
                self._instance(type(sub), vars(sub), prefix, depth, STANDARD)
                self._forward(type(sub))
            uses, holds = uses or some, holds or bool(sub._parameters or sub._buffers)
        for prefix, sub in modes if uses or not holds else ():
            self._space(vars(sub), ["training"], prefix, depth)

    def _container(self, value: Any, label: str, place: str, depth: int) -> None:
        if len(value) > LENGTH:
            return
        if not isinstance(value, tuple | frozenset):
            self._entries += len(value)
            found, is_rare = Content.of(value, label, place), self._entries > ENTRIES
            (self._rare if is_rare else self._watched).append(found)
            if not is_rare:
                self._equal.append((len, value))
                self._same += ((iter, one) for one in views_of(value))
        items = value.items() if isinstance(value, MAPPINGS) else enumerate(value)
        for key, item in items:
            self._look(item, f"{label}[{key!r}]", place, depth - 1)

    def _object(self, value: Any, label: str, depth: int) -> None:
        own = getattr(value, "__dict__", None)
        if own is not None:
            self._instance(type(value), own, label, depth)
            return
        slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
        self._space(Attributes(value), [name for name in self._names if name in slots], label, depth)

    def _class(self, kind: type, depth: int) -> None:
        """Of a class and those that it is made from: attributes that are read."""
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        own = [one for one in kind.__mro__ if _is_own(one.__module__)]
        for at, one in enumerate(own):
            # a class that is made from others may hide what they have
            hidden = {name for name in self._names for base in own[at + 1 :] if name in vars(base)}
            self._lacks(vars(one), f"{one.__qualname__}.", kind_of(kind), hidden)
            if one not in self._classes:
                self._classes.add(one)
                self._defined(vars(one), f"{one.__qualname__}.", depth)

    def _function(self, value: Any, depth: int) -> None:
        """Its code, default arguments, and what a function closes over."""
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if not isinstance(function, FunctionType) or not _is_own(function.__module__):
            return
        name, place = function.__qualname__, _line(function)
        self._functions.append((function, function.__code__))
        self._equal.append((_code, function))
        for default in (function.__defaults__, function.__kwdefaults__):
            self._look(default, f"the default arguments of {name}", place, depth - 1)
        if function.__defaults__ or function.__kwdefaults__:
            labels = (f"the default arguments of {name}",) * 2
            self._spaces.append(Space(Attributes(function), ("__defaults__", "__kwdefaults__"), labels, (place,) * 2))
        for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._cell(cell, f"{free} (which {name} closes over)", place, depth)

    def _cell(self, cell: CellType, label: str, place: str, depth: int) -> None:
        held = Attributes(cell)
        value = held["cell_contents"]
        if not isinstance(value, STAY):
            self._spaces.append(Space(held, ("cell_contents",), (label,), (place,)))
        self._look(value, label, place, depth)


def owners_of(module: nn.Module, *, live: bool = True) -> Owners:
    """The submodules of a module.

    Args:
        live: somebody else holds the module, and may change it; else what holds tensors is let go.
    """
    return {
        path: (type(sub), vars(sub) if live else {key: one for key, one in vars(sub).items() if not holds_tensor(one)})
        for path, sub in module.named_modules()
    }


def _tensors_in(attributes: Mapping[str, Any]) -> list[Any]:
    """The parameters and buffers among a submodule's attributes."""
    return [*attributes.get("_parameters", {}).values(), *attributes.get("_buffers", {}).values()]


def _line(function: FunctionType) -> str:
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"


def _reads_mode(kind: type[nn.Module]) -> bool:
    """Whether what modules of a class compute may depend on their mode: of the user's own any may."""
    return _is_own(kind.__module__) or "training" in getattr(kind.forward, "__code__", _reads_mode.__code__).co_names


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

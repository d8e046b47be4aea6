"""Watched: kinds of things that forward reads, each as it was, and what is told if it is another.

In: a place where something stands (names of an owner, a container, memory, tensors, a question). Out: what tells
whether it is as it was (`Facts` look at all of them in C, in every call), and a sentence if not. `outside.py` finds
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from threading import get_ident
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weft.runtime.weights.as_seen import AsSeen, Samples

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
MAPPINGS = (dict, MappingProxyType)
CONTAINERS = (list, tuple, set, frozenset, deque, *MAPPINGS)


Fact = tuple[Callable[[Any], Any], Any]
"""A function, and an object of which it gives something."""

ASKS_GRADIENT = "requires_grad of "
AGAIN = "call weft.parallelize() again after the change"
FLAG = f"pass a flag to forward in its place, for each value of which a program is made, or {AGAIN}"
MODE = f"leave its mode as it is, make it a submodule of the model, whose modes are followed, or {AGAIN}"
VALUE = f"pass it to forward, make it a buffer (register_buffer) and change its values, or {AGAIN}"


class Facts:
    """Facts as they were when they were noted, looked at all at once in C.

    Args:
        equal: what they give is compared by its value.
        same: what they give are objects, one after the other, which are to be the very same ones.
        empty: containers in which nothing is to be.

    >>> words = ["a"]
    >>> facts = Facts([(len, words)], [(iter, words)])
    >>> facts.is_same(), words.append("b"), facts.is_same()
    (True, None, False)
    """

    def __init__(
        self, equal: Collection[Fact], same: Collection[Fact] = (), empty: Iterable[Collection[Any]] = ()
    ) -> None:
        (asks, objects), (gets, spaces) = ([[one[at] for one in facts] for at in (0, 1)] for facts in (equal, same))
        self._all: list[list[Any]] = [asks, objects, [], gets, spaces, [], list(empty)]
        self.state: object = None
        """Of what is looked at: the same object as long as it is as it was when somebody said that it is right."""
        self.note()

    def note(self) -> None:
        """They are right as they are now."""
        asks, objects, _, gets, spaces, _, _ = self._all
        self._all[2] = list(map(_kept, map(call, asks, objects)))
        self._all[5] = list(chain.from_iterable(map(call, gets, spaces)))

    def is_same(self) -> bool:
        """False also where one is gone, or has no truth of its own."""
        asks, objects, equal, gets, spaces, same, empty = self._all
        try:
            return (
                list(map(call, asks, objects)) == equal
                and all(map(is_, chain.from_iterable(map(call, gets, spaces)), same))
                and not any(empty)
            )
        except (KeyError, RuntimeError, ValueError):
            return False

    def beside(self, other: Facts) -> Facts:
        """These and others, as they were noted, in one; the state is that of these."""
        found = Facts(())
        found._all, found.state = [one + more for one, more in zip(self._all, other._all, strict=True)], self.state
        return found


def _kept(value: Any) -> Any:
    """What was given: hooks are added to the very dict that a tensor has."""
    if isinstance(value, dict):
        return dict(value)
    return tuple(map(_kept, value)) if type(value) is tuple else value


def looked_up(spaces: Iterable[tuple[Any, Iterable[str]]]) -> list[Fact]:
    """Facts that give what stands under names: those of one owner are looked up together, in C; a KeyError if one is
    gone."""
    found: dict[int, tuple[Any, list[str]]] = {}
    for space, names in spaces:
        found.setdefault(id(space), (space, []))[1].extend(names)
    # of one name it would give no tuple
    return [(itemgetter(*names, names[0]), space) for space, names in found.values()]


class OfThread:
    """What a ContextVar holds, looked up as in a dict. Each thread has its own; other threads see what this one had."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self._variable, self._thread, self._first = variable, get_ident(), variable.get(None)

    def __getitem__(self, name: str) -> Any:
        return self._variable.get(None) if get_ident() == self._thread else self._first


class Attributes:
    """The attributes of an object without `__dict__`, looked up as in a dict."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name, None)
        except ValueError:  # an empty cell
            return None


@dataclass
class Space:
    """Names of one owner, and the objects that they stood for."""

    space: Any
    names: tuple[str, ...]
    labels: tuple[str, ...]
    places: tuple[str, ...]
    held: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.held = tuple(self.space[name] for name in self.names)

    def difference(self) -> str:
        """What is another one than it was."""
        for name, label, place, old in zip(self.names, self.labels, self.places, self.held, strict=True):
            try:
                new = self.space[name]
            except KeyError:
                return f"{label} was {shown(old)} when the program was made and is gone, {read_at(place)}"
            if not is_equal(old, new):
                return told(label, shown(old), shown(new), place)
        return ""


@dataclass
class Absent:
    """Names that an object has from its class, or not at all, and might get of its own."""

    space: Mapping[str, Any]
    names: frozenset[str]
    label: str
    places: Mapping[str, str]

    def difference(self) -> str:
        name = min(self.names & self.space.keys(), default=None)
        if name is None:
            return ""
        return f"{self.label}{name} was set to {shown(self.space[name])}, {read_at(self.places[name])}"


@dataclass
class Content:
    """A container, and what it held."""

    container: Any
    held: tuple[Any, ...]
    text: str
    label: str
    place: str

    @staticmethod
    def of(container: Any, label: str, place: str) -> Content:
        return Content(container, tuple(chain.from_iterable(views_of(container))), shown(container), label, place)

    def difference(self) -> str:
        now = tuple(chain.from_iterable(views_of(self.container)))
        if len(now) == len(self.held) and all(map(is_equal, self.held, now)):
            self.held = now
            return ""
        return told(self.label, self.text, shown(self.container), self.place)


@dataclass
class Memory:
    """An array of numbers, and its bytes."""

    array: Any
    held: bytes
    text: str
    label: str
    place: str

    @staticmethod
    def of(array: Any, label: str, place: str) -> Memory:
        return Memory(array, memoryview(array).tobytes(), shown(array), label, place)

    def now(self) -> bytes:
        """What it holds; not kept: a bytearray that is looked at cannot grow."""
        return memoryview(self.array).tobytes()

    def difference(self) -> str:
        return "" if self.now() == self.held else told(self.label, self.text, shown(self.array), self.place)


@dataclass
class Answer:
    """What a question gave: a word or a flag."""

    ask: Callable[[], Any]
    held: Any
    label: str
    place: str

    def difference(self) -> str:
        now = self.ask()
        return "" if is_equal(self.held, now) else told(self.label, shown(self.held), shown(now), self.place)


_version = attrgetter("_version")


class Tensors:
    """Tensors, how often each had been changed in place, where it lay, and a few of its elements."""

    def __init__(self) -> None:
        self.named: list[tuple[str, Tensor]] = []
        self._places: dict[str, str] = {}

    def add(self, tensor: Tensor, label: str, place: str) -> None:
        if has_memory(tensor):
            self.named.append((label, tensor))
            self._places[label] = place

    def seal(self) -> None:
        """All are there."""
        self._starts = [one.data_ptr() for _, one in self.named]
        self._seen = AsSeen(self.named, Samples())

    def asked(self) -> Iterator[Fact]:
        """What tells of most changes."""
        return ((ask, one) for _, one in self.named for ask in (_version, Tensor.data_ptr))

    def difference(self) -> str:
        """Looks at elements too: `.data` has no versions."""
        for (label, one), start in zip(self.named, self._starts, strict=True):
            if one.data_ptr() != start:
                return self._told(label, "given other memory (.data)")
        found = self._seen.changed()
        return "" if found is None else self._told(found, "changed in place")

    def _told(self, label: str, what: str) -> str:
        return f"the tensor {label} was {what} since the program was made, {read_at(self._places[label])}"


def has_memory(tensor: Tensor) -> bool:
    """Whether it lies somewhere and counts its changes: it is neither fake nor on the meta device."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_plain and tensor.device.type != "meta" and not tensor.is_inference()


def holds_tensor(value: Any) -> bool:
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


def views_of(container: Any) -> tuple[Iterable[Any], ...]:
    """What gives all that it holds: a dict's values, then its keys. Of a set in an order of its own, which stays while
    it does."""
    return (container.values(), container) if isinstance(container, MAPPINGS) else (container,)


def shown(value: Any) -> str:
    """A value, shortened."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, CONTAINERS) and holds_tensor(value):
        return f"a {type(value).__name__} of {len(value)}, tensors among them"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def told(label: str, old: str, new: str, place: str) -> str:
    same = f"is another one than when the program was made ({new})"
    changed = same if old == new else f"was {old} when the program was made and is {new}"
    return f"{label} {changed}, {read_at(place)}"


def read_at(place: str) -> str:
    return f"and forward reads it at {place}"


def remedy_for(changed: str) -> str:
    """What to do about a change: a function or module is no value that could be passed or kept in a buffer."""
    if changed.startswith(ASKS_GRADIENT):
        return FLAG
    if ".training was " in changed:
        return MODE
    is_code = changed.startswith(("the code of ", "forward does something else"))
    return AGAIN if is_code or "<function " in changed or ".forward " in changed else VALUE

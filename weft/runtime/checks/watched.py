"""Watched: kinds of things that forward reads, each as it was, and what is told if it is another.

In: a place where something stands (names of an owner, a container, memory, tensors, a question). Out: whether it is as
it was, and a sentence if not. `outside.py` finds them and asks in every call: what is asked is C-speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, call, is_, itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weft.runtime.weights.as_seen import AsSeen, Samples

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
MAPPINGS = (dict, MappingProxyType)
CONTAINERS = (list, tuple, set, frozenset, deque, *MAPPINGS)


class Facts:
    """Facts, each what a function gives of an object, asked all at once in C; and what they were.

    >>> words = ["a"]
    >>> facts = Facts([(len, words)])
    >>> facts.is_same(), words.append("b"), facts.is_same()
    (True, None, False)
    """

    def __init__(self, asked: Iterable[tuple[Callable[[Any], Any], Any]]) -> None:
        asked = list(asked)
        self._asks, self._objects = [ask for ask, _ in asked], [one for _, one in asked]
        self.held: Sequence[Any] = self.now()

    def now(self) -> list[Any]:
        """What they are."""
        return list(map(call, self._asks, self._objects))

    def is_same(self) -> bool:
        """False also where one is gone, or is no plain value and another one."""
        try:
            return self.now() == self.held
        except (KeyError, RuntimeError, ValueError):
            return False


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

    @property
    def ask(self) -> Callable[[Any], bool]:
        """Whether it has none of them: looked up in C, as many as there are fewer of."""
        return self.space.keys().isdisjoint


@dataclass
class Content:
    """A container, and what it held."""

    container: Any
    length: int
    held: tuple[Any, ...]
    text: str
    label: str
    place: str

    @staticmethod
    def of(container: Any, label: str, place: str) -> Content:
        return Content(container, len(container), tuple(_flat(container)), shown(container), label, place)

    def is_same(self) -> bool:
        return len(self.container) == self.length and all(map(is_, _flat(self.container), self.held))

    def difference(self) -> str:
        now = tuple(_flat(self.container))
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

    def is_same(self) -> bool:
        # not kept: a bytearray that is looked at cannot grow
        return memoryview(self.array).tobytes() == self.held

    def difference(self) -> str:
        return told(self.label, self.text, shown(self.array), self.place)


@dataclass
class Answer:
    """What a question gave."""

    ask: Callable[[], Any]
    held: Any
    label: str
    place: str

    def is_same(self) -> bool:
        return is_equal(self.held, self.ask())

    def difference(self) -> str:
        return told(self.label, shown(self.held), shown(self.ask()), self.place)


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

    def asked(self) -> Iterator[tuple[Callable[[Any], Any], Any]]:
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


def _flat(container: Any) -> Iterator[Any]:
    """All that it holds; a dict's values, then its keys. Of a set in an order of its own, which stays while it does."""
    yield from container.values() if isinstance(container, MAPPINGS) else container
    yield from container if isinstance(container, MAPPINGS) else ()


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

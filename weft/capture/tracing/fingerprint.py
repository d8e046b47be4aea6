"""Python values in a form that compares, and containers that get their contents back.

Enters: values that a forward may read or change. Leaves: fingerprints, equal exactly if the values are, as far as a
forward could have changed them: numbers and words by value, containers by what they hold, generators and counters by
their state, tensors, modules and functions by identity. Taking fingerprints of much takes time; whether containers
hold the very objects that they held is known at once.
"""

from __future__ import annotations

import copy
import itertools
import operator
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

DEPTH = 5
PLAIN: frozenset[type] = frozenset(
    (int, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, complex, float)
)
CONTAINERS = (list, dict, set, deque)
NESTING = (*CONTAINERS, tuple)
"""What may hold containers; what a frozenset holds does not change."""
CHANGING = (*NESTING, itertools.count)
BY_IDENTITY = (torch.Tensor, nn.Module, ModuleType, type)


Contents = Callable[[Any], Any]
"""From a container or counter to one that holds, or counts, what is meant."""


def _now(held: Any) -> Any:
    return held


def fingerprint(value: Any, depth: int = DEPTH, *, objects: bool = True, contents: Contents = _now) -> Any:
    """Something that compares equal exactly if the value is.

    Args:
        value: of any kind.
        depth: of containers that are looked into.
        objects: look at the attributes of other objects too.
        contents: what containers and counters hold; what they hold now if not given.
    """
    kind = type(value)
    if kind is float or kind is itertools.count:
        return kind, repr(contents(value))
    if kind in PLAIN:
        return kind, value
    if depth == 0 or isinstance(value, BY_IDENTITY) or callable(value):
        return kind, id(value)

    def of_all(values: Collection[Any]) -> tuple[Any, ...]:
        # plain values are taken all at once: a list of them may be long
        kinds = tuple(map(type, values))
        if not PLAIN.issuperset(kinds):
            return tuple([fingerprint(one, depth - 1, objects=objects, contents=contents) for one in values])
        return kinds, tuple(map(repr, values) if float in kinds else values)

    if isinstance(value, dict):
        held = contents(value)
        return kind, of_all(held.keys()), of_all(held.values())
    if isinstance(value, (list, tuple, deque)):
        return kind, of_all(contents(value))
    if isinstance(value, (set, frozenset)):
        items = contents(value)
        return kind, frozenset([fingerprint(one, depth - 1, objects=objects, contents=contents) for one in items])
    return (kind, id(value), object_state(value, depth)) if objects else (kind, id(value))


def object_state(value: Any, depth: int) -> Any:
    """The state of a generator; the attributes of any other object."""
    if isinstance(value, torch.Generator):
        with _disable_current_modes():
            return bytes(value.get_state().numpy())
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value).__module__.startswith("numpy"):
        return repr(getattr(getattr(value, "bit_generator", value), "state", None))
    inner = getattr(value, "__dict__", None)
    # of what lies deeper only the object is known, and a copy would be another one each time
    return None if inner is None or depth <= 1 else fingerprint(dict(inner), depth - 1)


class Containers:
    """What lists, dicts, sets and counters hold now: those among some values, and in them.

    Args:
        depth: of containers that are looked into.
    """

    def __init__(self, values: Iterable[Any], depth: int = DEPTH) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}
        for value in values:
            self._keep(value, depth)

    def _keep(self, value: Any, depth: int) -> None:
        if isinstance(value, itertools.count):
            self._held[id(value)] = value, copy.copy(value)
        elif depth and isinstance(value, NESTING):
            if isinstance(value, CONTAINERS):
                self._held[id(value)] = value, value.copy()
            items = value.values() if isinstance(value, dict) else value
            # most containers of a process hold plain values alone
            kinds = set(map(type, items))
            if not kinds <= PLAIN and (depth > 1 or itertools.count in kinds):
                for item in items:
                    if isinstance(item, CHANGING):
                        self._keep(item, depth - 1)

    def before(self, held: Any) -> Any:
        """What a container held; itself if it is none of these."""
        return self._held.get(id(held), (held, held))[1]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Each, and what it held."""
        return iter(self._held.values())

    def is_same(self) -> bool:
        """True if each holds the very objects that it held."""
        return all(holds_same(held, before) for held, before in self)

    def restore(self) -> None:
        """Give each its old contents, if it has others: the very objects."""
        for held, before in self:
            if isinstance(held, CONTAINERS) and not holds_same(held, before):
                refill(held, before)


def of_kinds(items: Iterable[Any], values: Iterable[Any], kinds: Collection[type]) -> Iterator[Any]:
    """Those of the items whose values are of these very classes: there are thousands to look at in a process.

    >>> list(of_kinds("ab", (1, 2.0), {int}))
    ['a']
    """
    return itertools.compress(items, map(kinds.__contains__, map(type, values)))


def refill(container: Any, saved: Any) -> None:
    """Give a list, dict or set its old contents."""
    container.clear()
    container.extend(saved) if isinstance(container, list | deque) else container.update(saved)


def holds_same(held: Any, before: Any) -> bool:
    """Whether a container holds the very objects that another does, and a counter counts from the same number."""
    if isinstance(held, itertools.count):
        return repr(held) == repr(before)
    if len(held) != len(before):
        return False
    if isinstance(held, set):
        return set(map(id, held)) == set(map(id, before))
    is_same = all(map(operator.is_, held, before))
    return is_same and (not isinstance(held, dict) or all(map(operator.is_, held.values(), before.values())))

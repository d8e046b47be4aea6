"""Python values in a form that compares, and containers that get their contents back.

Enters: values that a forward may read or change. Leaves: fingerprints, equal exactly if the values are, as far as a
forward could have changed them: numbers and words by value, containers by what they hold, generators and counters by
their state, tensors, modules and functions by identity.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

DEPTH = 5
PLAIN = frozenset((int, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, complex, float))
CONTAINERS = (list, dict, set, deque)
BY_IDENTITY = (torch.Tensor, nn.Module, type)


def fingerprint(value: Any, depth: int = DEPTH, *, objects: bool = True) -> Any:
    """Something that compares equal exactly if the value is.

    Args:
        value: of any kind.
        depth: of containers that are looked into.
        objects: look at the attributes of other objects too.
    """
    kind = type(value)
    if kind is float or kind is itertools.count:
        return kind, repr(value)
    if kind in PLAIN:
        return kind, value
    if depth == 0 or isinstance(value, BY_IDENTITY) or callable(value):
        return kind, id(value)
    if isinstance(value, dict):
        return kind, _of_all(value.keys(), depth - 1, objects), _of_all(value.values(), depth - 1, objects)
    if isinstance(value, (list, tuple, deque)):
        return kind, _of_all(value, depth - 1, objects)
    if isinstance(value, (set, frozenset)):
        return kind, frozenset([fingerprint(item, depth - 1, objects=objects) for item in value])
    return (kind, id(value), object_state(value, depth)) if objects else (kind, id(value))


def _of_all(values: Collection[Any], depth: int, objects: bool) -> tuple[Any, ...]:
    """Of what a container holds, in order. Plain values are taken all at once: a list of them may be long."""
    kinds = tuple(map(type, values))
    if not PLAIN.issuperset(kinds):
        return tuple([fingerprint(item, depth, objects=objects) for item in values])
    return kinds, tuple(map(repr, values) if float in kinds else values)


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
    return None if inner is None else fingerprint(dict(inner), depth - 1)


class Containers:
    """What lists, dicts and sets among some values hold now."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._held = {id(one): (one, one.copy()) for one in _containers(values, DEPTH)}

    def before(self, held: Any) -> Any:
        """What a container held; itself if it is none of these."""
        return self._held.get(id(held), (held, held))[1]

    def __iter__(self) -> Any:
        return iter(self._held.values())

    def restore(self) -> None:
        """Give each its old contents, if it has others: the very objects."""
        for held, copy in self._held.values():
            if identities(held) != identities(copy):
                refill(held, copy)


def _containers(values: Iterable[Any], depth: int) -> Iterator[Any]:
    """Those among some values, and in them."""
    for one in values if depth else ():
        if isinstance(one, CONTAINERS):
            yield one
        if isinstance(one, (*CONTAINERS, tuple)):
            yield from _containers(one.values() if isinstance(one, dict) else one, depth - 1)


def refill(container: Any, saved: Any) -> None:
    """Give a list, dict or set its old contents."""
    container.clear()
    container.extend(saved) if isinstance(container, list | deque) else container.update(saved)


def identities(held: Any) -> list[Any]:
    """The objects in a container."""
    return [(key, id(value)) for key, value in held.items()] if isinstance(held, dict) else [id(one) for one in held]

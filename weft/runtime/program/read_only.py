"""Read-only: lists, dicts and sets of the original's attributes, to be read and not to be changed.

In: a value, and what makes the error for a change. Out: the same value, its containers copied into some of the same
kind that refuse to be changed in place: programs were made with what was in them. A copy of one is an ordinary one.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Refused = Callable[[], Exception]
CHANGES = (
    *("__setitem__", "__delitem__", "__ior__", "__iadd__", "__imul__", "__iand__", "__isub__", "__ixor__"),
    *("append", "extend", "insert", "remove", "pop", "popitem", "clear", "sort", "reverse", "update", "setdefault"),
    *("add", "discard", "difference_update", "intersection_update", "symmetric_difference_update", "move_to_end"),
)
"""Methods that change a container in place."""


def _closed(kind: type[Any]) -> type[Any]:
    """A kind of containers that are changed until `_refuse` says no more."""

    def closed(name: str) -> Callable[..., Any]:
        change = getattr(kind, name)

        @functools.wraps(change)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._refuse is not None:
                raise self._refuse()
            return change(self, *args, **kwargs)

        return method

    def reduced(self: Any, _protocol: Any) -> tuple[Any, ...]:
        plain = dict(self) if isinstance(self, dict) else list(self)
        return kind, (self.default_factory, plain) if isinstance(self, defaultdict) else (plain,)

    methods = {name: closed(name) for name in CHANGES if hasattr(kind, name)}
    return type(kind.__name__, (kind,), {**methods, "_refuse": None, "__reduce_ex__": reduced})


CLOSED = {kind: _closed(kind) for kind in (list, dict, set, OrderedDict, defaultdict)}


def read_only(value: Any, refused: Refused) -> Any:
    """The value; containers as copies that cannot be changed."""
    kind = type(value)
    if kind is tuple:
        return tuple(read_only(one, refused) for one in value)
    if kind not in CLOSED:
        return value
    found = CLOSED[kind](*((value.default_factory,) if kind is defaultdict else ()))
    if isinstance(value, dict):
        found.update((key, read_only(one, refused)) for key, one in value.items())
    elif isinstance(value, list):
        found.extend(read_only(one, refused) for one in value)
    else:
        found.update(value)
    found._refuse = refused
    return found


def holds_tensors(value: Any, inside: tuple[int, ...] = ()) -> bool:
    """True of a tensor or module, and of a container with one in it, or with itself."""
    if isinstance(value, Tensor | nn.Module) or id(value) in inside:
        return True
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return False
    held = value.values() if isinstance(value, dict) else value
    return any(holds_tensors(one, (*inside, id(value))) for one in held)

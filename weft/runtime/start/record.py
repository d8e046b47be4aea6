"""Record: how the values of a module come about, as data.

    Record := Entry ...                        in the order of the constructor
    Entry  := operator, arguments (At for a hollow tensor), what it makes
    At     := storage, geometry, dtype         of a tensor in a storage

Written by `recording.py`; read by `replaying.py`, which runs it, and by `counted.py`, which makes values of the same
kind element by element.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass(frozen=True)
class At:
    """A tensor in a hollow storage."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.size)


@dataclass(frozen=True)
class Entry:
    """One operator to be run."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: tuple[At | None, ...]
    """What the results are in new storages; None for those that are not."""
    writes: frozenset[int] = frozenset()
    covers: frozenset[int] = frozenset()
    """Storages of which it overwrites all and reads nothing."""
    draws: bool = False
    state: Tensor | int | None = None
    """What the generator is set to before: a state, or the one after so many draws."""
    default_dtype: torch.dtype = torch.float32
    place: str = ""
    """The line of the construction that it comes from."""

    @cached_property
    def name(self) -> str:
        """The operator and its overload."""
        if not isinstance(self.function, torch._ops.OpOverload):
            return self.function.__name__
        overload = self.function._schema.overload_name
        return self.function._schema.name + (f".{overload}" if overload else "")

    @cached_property
    def sets(self) -> frozenset[int]:
        """All storages that it writes or makes."""
        return self.writes | {one.storage for one in self.makes if one is not None}

    @cached_property
    def touches(self) -> frozenset[int]:
        """All storages that it reads, writes or makes."""
        found: set[int] = set()
        tree_map(lambda one: found.add(one.storage) if isinstance(one, At) else None, (self.args, self.kwargs))
        return frozenset(found | {one.storage for one in self.makes if one is not None})


@dataclass(frozen=True)
class Record:
    """How the values of a module come about."""

    entries: tuple[Entry, ...]
    sizes: tuple[int, ...]
    """Bytes of each storage."""
    tensors: dict[str, At | Tensor]
    """Parameters and buffers by every name; those that have their values already as they are."""
    seed: int
    raw: frozenset[str] = frozenset()
    """Names of small tensors that nothing ever gives a value."""

    def unset(self, names: Iterable[str]) -> list[str]:
        """Those that nothing ever gives a value."""
        set_at = {storage for entry in self.entries for storage in entry.sets}
        tensors = {name: self.tensors[name] for name in names}
        return [
            name
            for name, one in tensors.items()
            if name in self.raw or (isinstance(one, At) and one.numel and one.storage not in set_at)
        ]

    def digest(self) -> str:
        """Equal on ranks that would come to the same values."""
        found = hashlib.sha256(str(self.seed).encode())
        for entry in self.entries:
            found.update(f"{entry.name} {_text(entry.args)} {_text(entry.kwargs)} {entry.makes}".encode())
            found.update(_text(entry.state).encode())
        for name, tensor in self.tensors.items():
            found.update(f"{name} {_text(tensor)}".encode())
        return found.hexdigest()


def _text(value: Any) -> str:
    """An argument in words that do not depend on the process."""
    if isinstance(value, Tensor):
        plain = value.detach().reshape(-1)
        step = max(1, plain.numel() // 64)
        return f"{value.dtype} {tuple(value.shape)} {plain[::step].tolist()}"
    if isinstance(value, dict):
        return str({key: _text(one) for key, one in value.items()})
    return str([_text(one) for one in value]) if isinstance(value, tuple | list) else str(value)

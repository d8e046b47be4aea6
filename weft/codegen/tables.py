"""Tables: what differs by rank, by coordinates wherever it follows the axes of the grid.

In: values by rank, with a hint for their name. Out: a key that the text looks up, and JSON. Equal tables share a key.

    {"axes": ["dp"], "values": [2, 1]}       by coordinates
    {"ranks": {"0": 2, "5": 1}}              by rank
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from weft.codegen.names import free_name
from weft.codegen.spread import GridOf
from weft.runtime.layout.cuts import Place


class Tables:
    """Collects tables of one program."""

    def __init__(self, grid: GridOf, places: Sequence[Place]) -> None:
        self._grid, self._places = grid, places
        self._keys: dict[tuple[str, str], str] = {}
        self.sections: dict[str, dict[str, Any]] = {"here": {}, "stored": {}, "moves": {}}

    def key(self, section: str, hint: str, values: Mapping[int, Any]) -> str:
        """The key under which these values by rank stand."""
        axes = self.axes_of(values)
        table: dict[str, Any] = (
            {"ranks": {str(rank): value for rank, value in sorted(values.items())}}
            if axes is None
            else {"axes": list(axes), "values": self._nested(values, axes)}
        )
        text = json.dumps(table)
        if (section, text) not in self._keys:
            base = "_".join((hint, *(axes or ())))
            taken = self.sections[section]
            name = free_name(base, lambda name: name not in taken)
            self._keys[section, text] = name
            taken[name] = table
        return self._keys[section, text]

    def axes_of(self, values: Mapping[int, Any]) -> tuple[str, ...] | None:
        """The fewest axes of the grid that tell the values apart; None if it takes the ranks themselves."""
        frozen = {rank: _frozen(value) for rank, value in values.items()}
        if len(set(frozen.values())) == 1:
            return ()
        if len(values) < len(self._places):
            return None
        axes = [name for name, _ in self._grid]
        for name in list(axes):
            rest = tuple(other for other in axes if other != name)
            if self._tell_apart(frozen, rest):
                axes.remove(name)
        return tuple(axes)

    def _tell_apart(self, values: Mapping[int, Hashable], axes: tuple[str, ...]) -> bool:
        seen: dict[int, Hashable] = {}
        return all(seen.setdefault(self._places[rank].at(axes), value) == value for rank, value in values.items())

    def by_axes(self, values: Mapping[int, Any], axes: tuple[str, ...]) -> list[Any]:
        """The values by position along the axes together."""
        found = {self._places[rank].at(axes): value for rank, value in values.items()}
        return [found[at] for at in range(len(found))]

    def _nested(self, values: Mapping[int, Any], axes: tuple[str, ...]) -> Any:
        if not axes:
            return next(iter(values.values()))
        flat = self.by_axes(values, axes)
        for name in reversed(axes[1:]):
            size = dict(self._grid)[name]
            flat = [flat[i : i + size] for i in range(0, len(flat), size)]
        return flat


def tables_text(
    sections: Mapping[str, Mapping[str, Any]], lines: Sequence[str] = (), said: Callable[[Any], Any] | None = None
) -> str:
    """Tables as JSON, one line a key.

    Args:
        lines: what stands before them.
        said: gives what stands for a value that JSON does not know.
    """
    found = list(lines)
    for section, tables in sections.items():
        body = ",\n".join(f"  {json.dumps(key)}: {json.dumps(table, default=said)}" for key, table in tables.items())
        found.append(f" {json.dumps(section)}: " + (f"{{\n{body}\n }}" if body else "{}"))
    joined = ",\n".join(found)
    return f"{{\n{joined}\n}}\n"


def _frozen(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return tuple((key, _frozen(one)) for key, one in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value

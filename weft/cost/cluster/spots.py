"""Values of a YAML file that know where they stand.

In: text. Out: a `Spot` for each value: file, line, field. What is wrong with a value is an error that names these; a
misspelt field is one with the nearest right word. Loading is safe: YAML's plain types only, no tags, no aliases.

    number := 3.5 | 450e9 | 450 GB/s | 80 GiB | 3.4 us | 312 TFLOP/s
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NoReturn

import yaml

from weft.errors import WeftError, did_you_mean

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = {f"{prefix}B": factor for prefix, factor in (_PREFIXES | _BINARY).items()}
UNITS: Mapping[str, Mapping[str, int | Decimal]] = {
    "bytes": _BYTES,
    "bytes/s": {f"{unit}/s": factor for unit, factor in _BYTES.items()}
    | {f"{prefix}b/s": Decimal(factor) / 8 for prefix, factor in _PREFIXES.items()},
    "seconds": {"s": 1, "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "ns": Decimal("1e-9")},
    "FLOP/s": {f"{prefix}FLOP/s": factor for prefix, factor in _PREFIXES.items()},
    "": {},
}
"""By what a number counts: its units, and how many of the first a unit is."""
_NUMBER = re.compile(r"([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*(\S*)")


@dataclass(frozen=True)
class Spot:
    """A value and where it stands.

    Args:
        value: a plain value, a list of Spots, or Spots by name. field: as `levels[0].span`.
    """

    value: Any
    file: str
    line: int
    field: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}, line {self.line}" + (f", {self.field}" if self.field else "")

    def refuse(self, message: str, remedy: str) -> NoReturn:
        raise WeftError(message, place=self.place, remedy=remedy)

    def fields(self, known: Collection[str], needed: Collection[str] = ()) -> dict[str, Spot]:
        """The fields of a mapping: only those that are known, all that are needed."""
        if not isinstance(self.value, dict):
            self.refuse(f"{self._text} is no mapping", f"write its fields: {', '.join(known)}")
        for name, spot in self.value.items():
            if name not in known:
                near = did_you_mean(name, known)
                spot.refuse(f"{name!r} is no field here", f"{near}fields: {', '.join(known)}")
        for name in needed:
            if name not in self.value:
                self.refuse(f"{name!r} is missing", f"write {name}: ...")
        return dict(self.value)

    def items(self) -> dict[str, Spot]:
        """What a mapping holds, under any names."""
        if not isinstance(self.value, dict):
            self.refuse(f"{self._text} is no mapping", "write name: value")
        return dict(self.value)

    def list(self) -> list[Spot]:
        if not isinstance(self.value, list):
            self.refuse(f"{self._text} is no list", "begin each entry with '- '")
        return list(self.value)

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.refuse(f"{self._text} is no text", "write a name")
        return str(self.value)

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            self.refuse(f"{self._text} is neither true nor false", "write true or false")
        return bool(self.value)

    def whole(self, least: int) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < least:
            self.refuse(f"{self._text} is no whole number from {least} on", f"write a number such as {max(least, 8)}")
        return int(self.value)

    def number(self, counts: str = "") -> float:
        """A number that is not negative, in bytes, seconds and so on; with its unit if it is written as text."""
        units = UNITS[counts]
        found = self.value
        if isinstance(found, str) and (match := _NUMBER.fullmatch(found.strip())):
            unit = match[2]
            if unit and unit not in units:
                near = did_you_mean(unit, units)
                self.refuse(
                    f"{found!r}: {unit} is no unit of {counts or 'a plain number'}",
                    f"{near}units: {', '.join(units) or 'none'}",
                )
            # a decimal product is rounded once
            with suppress(ArithmeticError):
                found = float(Decimal(match[1]) * Decimal(units.get(unit, 1)))
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
            some = f", or with a unit: {', '.join(units)}" if units else ""
            self.refuse(f"{self._text} is no number >= 0", f"write a number of {counts or 'its own'}{some}")
        return float(found)

    def plain(self) -> Any:
        """The value without places."""
        match self.value:
            case dict(fields):
                return {name: spot.plain() for name, spot in fields.items()}
            case list(entries):
                return [spot.plain() for spot in entries]
        return self.value

    @property
    def _text(self) -> str:
        text = repr(self.plain())
        return text if len(text) < 60 else f"{text[:57]}..."


def read(text: str, file: str) -> Spot:
    """The one document of a YAML text."""
    try:
        loader = LOADER(text)
        node = loader.get_single_node()
        if node is None:
            raise WeftError(f"{file} is empty", place=file, remedy="write a cluster: name, hosts, devices, device")
        return _spot(node, loader, Spot(set(), file, 1))
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        place = f"{file}, line {mark.line + 1}" if mark else file
        raise WeftError(f"not YAML: {error.problem or error.context}", place=place, remedy="correct the line") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).partition("\n")[0]
        raise WeftError(f"not YAML: {first or 'too deep'}", place=file, remedy="write plain text and numbers") from None


def _spot(node: yaml.Node, loader: Any, at: Spot) -> Spot:
    """The value of a node; `at` is where it stands, with the nodes that were read so far."""
    if id(node) in at.value:
        at.refuse("an alias repeats another part of the file", "write it out")
    at.value.add(id(node))
    at = replace(at, line=node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        entries = enumerate(node.value)
        return replace(at, value=[_spot(one, loader, replace(at, field=f"{at.field}[{i}]")) for i, one in entries])
    if isinstance(node, yaml.MappingNode):
        return replace(at, value=dict(_fields(node, loader, at)))
    return replace(at, value=loader.construct_object(node))


def _fields(node: yaml.MappingNode, loader: Any, at: Spot) -> Iterator[tuple[str, Spot]]:
    seen: set[str] = set()
    for key, value in node.value:
        here = replace(at, line=key.start_mark.line + 1)
        if not isinstance(key, yaml.ScalarNode):
            here.refuse("a list or mapping is no name of a field", "write name: value")
        name = str(key.value)
        here = replace(here, field=f"{at.field}.{name}" if at.field else name)
        if name in seen:
            here.refuse(f"{name!r} is written twice", "leave one of them")
        seen.add(name)
        yield name, replace(_spot(value, loader, here), line=here.line)

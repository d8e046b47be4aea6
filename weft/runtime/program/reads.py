"""Reads: what a forward reads besides its inputs, parameters and buffers, by name and with the line that does.

In: names that capture noted. Out: a Reads, which travels with the program as JSON; values do not. Each rank looks up
what the names stand for when it opens the program (`checks/outside.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

ANY = ""
"""For the kind of an object: whichever it is."""
OVER = "*"
"""For the kind of an object: a module, whose children, parameters or buffers are gone over."""


@dataclass(frozen=True)
class Reads:
    """Names that forward reads.

    Args:
        globals: a Python module, a name in it ("": the module itself is imported), and the first line that reads it.
        names: of attributes, of whatever object, and the first line for each.
        environ: environment variables, likewise.
        gradients: the lines that ask whether a tensor requires a gradient, and the parameters that it depends on.
        default_dtype: the first line that asks for torch's default dtype, or makes a tensor of it.
        tensors: those that it computes with of modules that the model does not own, as they are told; None for all.
        asked: names that it asks objects for, there or not: the kind of object (`kind_of`, ANY, OVER, or a Python
            module), the name, and the first line.
    """

    globals: tuple[tuple[str, str, str], ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    gradients: tuple[tuple[str, tuple[str, ...]], ...] = ()
    default_dtype: str = ""
    tensors: tuple[str, ...] | None = ()
    asked: tuple[tuple[str, str, str], ...] = ()

    def asked_of(self, kind: str) -> dict[str, str]:
        """The names that objects of a kind are asked for, each with its line."""
        return {name: place for one, name, place in self.asked if one in (kind, ANY)}

    def only(self, globals: Collection[tuple[str, str]], names: Collection[str], tensors: Collection[str]) -> Reads:
        """Without names that stand for nothing."""
        return replace(
            self,
            globals=tuple(one for one in self.globals if one[:2] in globals),
            names=tuple(one for one in self.names if one[0] in names),
            tensors=tuple(tensors),
        )

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Reads:
        return Reads(
            tuple((module, name, place) for module, name, place in found["globals"]),
            tuple((name, place) for name, place in found["names"]),
            tuple((name, place) for name, place in found["environ"]),
            tuple((place, tuple(names)) for place, names in found["gradients"]),
            found["default_dtype"],
            tuple(found["tensors"]),
            tuple((kind, name, place) for kind, name, place in found["asked"]),
        )


def kind_of(owner: Any) -> str:
    """The class of an object, of a class itself, by name; a Python module's own name.

    >>> kind_of(1), kind_of(int)
    ('builtins.int', 'builtins.int')
    """
    if isinstance(owner, ModuleType):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"

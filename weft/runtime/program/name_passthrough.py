"""Own: a module that shows what the user's model has, under the user's names, beside attributes of its own.

In: attributes that are set in construction, before what it shows. Out: they can be set again whatever the submodules,
parameters and buffers are called that it shows; `get_submodule` finds those under any name. What it holds apart is
among its modules, and not among those that torch saves and loads by their names, also as part of another module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from weft.runtime.program.shown.attributes import Attributes


class Own(Attributes):
    """A module whose own attributes are not mistaken for what it shows under the same names."""

    def show(self, tree: nn.Module) -> None:
        """Show what a tree holds. Not as a child: names are to be the original ones."""
        self._modules, self._parameters, self._buffers = tree._modules, tree._parameters, tree._buffers
        self._non_persistent_buffers_set = tree._non_persistent_buffers_set

    _held_apart: Mapping[str, nn.Module] = MappingProxyType({})

    def hold_apart(self, name: str, module: nn.Module) -> None:
        """Another child, whose name is not to be in state dicts."""
        self.__dict__["_held_apart"] = {**self._held_apart, name: module}

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__.get("_held_apart", {}).get(name)
        return super().__getattr__(name) if found is None else found

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        yield from super().named_children()
        yield from self._held_apart.items()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        seen = set[nn.Module]() if memo is None else memo
        if self not in seen:
            yield from super().named_modules(seen, prefix, remove_duplicate)
            start = f"{prefix}." if prefix else ""
            for name, module in self._held_apart.items():
                yield from module.named_modules(seen, f"{start}{name}", remove_duplicate)

    def __setattr__(self, name: str, value: Any) -> None:
        # torch looks for a name among parameters, modules and buffers first
        if name in self.__dict__ and not isinstance(value, nn.Module | nn.Parameter):
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def get_submodule(self, target: str) -> nn.Module:
        """As of any module; what is shown comes before attributes."""
        first, _, rest = target.partition(".")
        found = self._modules.get(first)
        return super().get_submodule(target) if found is None else found.get_submodule(rest)

"""Own: a module that shows what the user's model has, under the user's names, beside attributes of its own.

In: attributes that are set in construction, before what it shows. Out: they can be set again whatever the submodules,
parameters and buffers are called that it shows; `get_submodule` finds those under any name. What it holds apart is
among its modules, and not among those that torch saves and loads by their names, also as part of another module.
`LoadsByName`: torch asks such a module for all that it shows at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn


class Own(nn.Module):
    """A module whose own attributes are not mistaken for what it shows under the same names."""

    _held_apart: Mapping[str, nn.Module] = MappingProxyType({})

    def hold_apart(self, name: str, module: nn.Module) -> None:
        """Another child, whose name is not to be in state dicts."""
        self.__dict__["_held_apart"] = {**self._held_apart, name: module}

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


class Loaded(NamedTuple):
    """What was wrong with the values that a module was given: names, and whole sentences."""

    missing: list[str]
    unexpected: list[str]
    errors: list[str]


class LoadsByName(Own):
    """A module that takes values under the names that it shows, whatever torch takes for its children."""

    @abstractmethod
    def load_given(self, given: Mapping[str, Any], *, strict: bool, assign: bool) -> Loaded:
        """Take values by name."""

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Asked by torch, of this module or of one that holds it: `prefix` stands before the names."""
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        given = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        assign = bool(local_metadata.get("assign_to_params_buffers"))
        found = self.load_given(given, strict=strict, assign=assign)
        missing_keys += [prefix + name for name in found.missing]
        unexpected_keys += [prefix + name for name in found.unexpected]
        error_msgs += found.errors

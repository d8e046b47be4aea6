"""Attributes: a module that shows those of the original.

In: what one submodule of the original has (`surface.py`), and the names that forward asks for (`reads.py`). Out: a
module that says that it is of the original's class (`isinstance`, `__class__`), since users sort modules and parameters
by it. Attributes can be read; one that forward may read cannot be set, since no program would read it. Other
attributes, those of the caller's own, can; what holds tensors cannot, since nothing would save it. A method of the
original's would work on what the rank holds: it is refused when it is called. A property is worked out here, and
refused where the original's is another.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import container

from weft.errors import Refuse, RunError
from weft.runtime.program.read_only import holds_tensors, read_only
from weft.runtime.program.reads import OVER, Reads, kind_of
from weft.runtime.program.surface import HELD, NO_STATE, Node, joined, own_classes

UNREAD = "make it a buffer (register_buffer) and change its values, pass it to forward, or set it before parallelize()"
AGAIN = (
    "load parallel.full_state_dict() into the model, change it, and call weft.parallelize() again: a program is made "
    "of its submodules and functions"
)
VALUES = (
    "change its values: with torch.no_grad(): parameter.copy_(values); or change the model and call "
    "weft.parallelize() again"
)
ELSEWHERE = (
    "call it on the original module before parallelize(); afterwards load parallel.full_state_dict() into a module of "
    "its own, and call it there"
)
CALLED = "parallelize() that part by itself, or let forward of the model return what it gives"
MISSING = object()
ALIKE = (torch.device, torch.dtype, nn.Module, str, bool, type(None))
"""Kinds of values that are the same on every rank, whatever it holds."""
READS = frozenset(
    {"keys", "values", "items", "get", "__iter__", "__len__", "__getitem__", "__contains__"}
    | {"_get_item_by_idx", "_get_abs_string_index", "_key_to_attr"}
)
"""Methods of torch's containers that work on what is shown."""


class NotHeldError(RunError, AttributeError):
    """A parameter or buffer of the model that this rank does not hold: there is no such attribute here."""


class Answering:
    """Says that it is of another class."""

    _shown_node = Node()

    _refuse: Refuse

    @property
    def __class__(self) -> type[Any]:
        kind = self._shown_node.kind
        # torch.compile would trace the original's forward in place of ours
        is_traced = kind is not None and sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo")
        return type(self) if kind is None or is_traced else kind

    @__class__.setter
    def __class__(self, kind: type[Any]) -> None:
        raise self._refuse(
            f"the class of a part of a parallel module is set to {kind.__name__}, and programs do not follow",
            AGAIN,
        )


class Attributes(Answering, nn.Module):
    """A module that shows attributes of the original, to be read."""

    _shown_path = ""
    _shown_from: Callable[[], nn.Module] | None = None
    _assigned: Mapping[str, Callable[[Any], None]] = MappingProxyType({})
    """What sets buffers."""
    _shown_asked: dict[str, str]
    """Names that forward asks the original for, which has none of them, and the lines that do."""

    def tell(self, node: Node, refuse: Refuse, path: str = "", original: Callable[[], nn.Module] | None = None) -> None:
        """Say what the original has here, and how to refuse a change of it."""
        self.__dict__.update(_refuse=refuse, _shown_path=path, _shown_from=original, _shown_asked={})
        shown = {
            name: read_only(value, partial(self._unread, name, "changed")) for name, value in node.attributes.items()
        }
        self.__dict__["_shown_node"] = replace(node, attributes=shown)
        if node.extra is not NO_STATE:
            self.__dict__.update(get_extra_state=self.extra_state, set_extra_state=self.check_extra_state)

    def __setattr__(self, name: str, value: Any) -> None:
        if (assign := self._assigned.get(name)) is not None:
            return assign(value)
        self._refuse_unread(name, isinstance(value, nn.Module | nn.Parameter))
        if isinstance(value, nn.Module):
            self._refuse_own(name, value)
        return super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        node = self._shown_node
        if node.kind is not None and (self.shows_name(name) or name in node.parameters | node.buffers | node.children):
            raise self._unread(name, "deleted")
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """One without tensors, of the caller's own."""
        self._refuse_unread(name, held=True)
        self._refuse_own(name, module)
        super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """In place of one of the model's: the next forward tells. No other."""
        self._refuse_unread(name, held=True)
        self._refuse_own(name, param)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Likewise."""
        self._refuse_unread(name, held=True)
        self._refuse_own(name, tensor)
        super().register_buffer(name, tensor, persistent)

    def _refuse_own(self, name: str, value: Tensor | nn.Module | None) -> None:
        """Refuse what would be among parameters and in state dicts, and is no part of the model."""
        node = self._shown_node
        if node.kind is None or name in node.parameters | node.buffers or value is None:
            return
        if isinstance(value, nn.Module) and not any(True for _ in (*value.parameters(), *value.buffers())):
            return
        raise self._refuse(
            f"{self._dotted(name)} is no part of the model that was parallelized: what saves, loads and clips the "
            "model would leave it out",
            "make it part of the model before parallelize(); or keep it beside the parallel module, in a variable or "
            "in a module that holds both",
        )

    def own_children(self) -> Iterator[nn.Module | None]:
        """Modules that the caller has set."""
        if len(self._modules) > len(self._shown_node.children & self._modules.keys()):
            yield from (one for name, one in self._modules.items() if name not in self._shown_node.children)

    def ask_for(self, reads: Reads) -> None:
        """Say what a forward asks for, there or not."""
        if self._shown_node.kind is not None:
            self._shown_asked.update(reads.asked_of(kind_of(self._shown_node.kind)))
            self._shown_asked.update((kind, place) for kind, _, place in reads.asked if kind == OVER)

    def ask_as(self, other: Attributes) -> None:
        """The same is asked for as of another that shows the same, also later on."""
        if self._shown_node.kind is not None:
            self.__dict__["_shown_asked"] = other._shown_asked

    def _refuse_unread(self, name: str, held: bool) -> None:
        """Refuse to set what programs do not read, and forward of the original would.

        Args:
            held: it is a module, parameter or buffer.
        """
        if self._shown_node.kind is None:
            return
        if self._is_unread(name):
            raise self._unread(name)
        place = self._shown_asked.get(name) or (self._shown_asked.get(OVER) if held else None)
        if place is not None and name not in self.__dict__ and not self._is_ours(name):
            raise self._refuse(
                f"{self._dotted(name)} is set, and programs do not read it: there was none when they were made, and "
                f"forward looks for it at {place}",
                "set it before parallelize(), or under a name that forward does not look for",
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = self._shown(name)
            if found is MISSING:
                raise
            return found

    def _dotted(self, name: str) -> str:
        return joined(self._shown_path, name)

    def _unread(self, name: str, how: str = "set") -> Exception:
        node, found = self._shown_node, self._dotted(name)
        is_made_of = name in node.children or (name not in node.attributes and callable(self._static(name)))
        if is_made_of or how == "deleted" or name.lstrip("-").isdigit():
            return self._refuse(f"{found} is {how}, and programs go on with what they were made of", AGAIN)
        if name in node.parameters:
            return self._refuse(f"{found} is set, and programs go on with the parameter that was there", VALUES)
        message = f"{found} is {how}, and programs do not read it: they were made with the value that it had"
        return self._refuse(message, UNREAD)

    def shows_name(self, name: str) -> bool:
        """True if a name is of the original, and nothing of the runtime's is called so."""
        shown = self._shown_node.attributes
        return name in shown or (self._static(name) is not MISSING and not self._is_ours(name))

    def _is_ours(self, name: str) -> bool:
        """True if it is the name of something of the runtime's."""
        return any(name in vars(kind) for kind in own_classes(type(self)))

    def ours_of(self, names: Iterable[str]) -> set[str]:
        """Those of some names that something of the runtime's is called."""
        return set(filter(self._is_ours, names))

    def shown_names(self) -> set[str]:
        """The attributes of the original that are shown, and no other thing of that name."""
        return {name for name in self._shown_node.attributes if self.shows_name(name) and not self._is_ours(name)}

    def _is_unread(self, name: str) -> bool:
        """True if nothing would read what is set. Of a parameter that is held here the next forward tells."""
        node = self._shown_node
        held = name in self._parameters or name in self._buffers
        return self.shows_name(name) or name in node.children or (name in node.parameters | node.buffers and not held)

    # What the original has.

    def _static(self, name: str) -> Any:
        """What the classes of the original have under a name."""
        kinds = () if self._shown_node.kind is None else own_classes(self._shown_node.kind)
        return next((vars(kind)[name] for kind in kinds if name in vars(kind)), MISSING)

    def _shown(self, name: str) -> Any:
        node = self._shown_node
        if name in node.attributes:
            if node.attributes[name] is HELD:
                raise self._refuse(
                    f"{self._dotted(name)} holds tensors or modules of the original, which are not shown",
                    "make them buffers or submodules; or read them from the original module",
                )
            return node.attributes[name]
        if name in node.parameters or name in node.buffers:
            raise NotHeldError(
                f"{self._dotted(name)} is not held here: other ranks hold it",
                remedy="what a rank holds is in named_parameters() and named_buffers() of its module (with "
                "emulate=True of parallel.ranks[N])",
            )
        found = self._static(name)
        if isinstance(found, staticmethod | classmethod):
            return getattr(node.kind, name)
        if isinstance(found, property | cached_property):
            return self._property(name, found.fget if isinstance(found, property) else found.func)
        if isinstance(found, FunctionType):
            is_read = found.__module__ == container.__name__ and name in READS
            return MethodType(found, self) if is_read else self.uncallable(name, found)
        return MISSING

    def uncallable(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """In place of a method of the original's."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            kind = self.__class__.__name__
            raise self._refuse(
                f"{self._dotted(name)}() of {kind} would work on what this rank holds, not on the model",
                CALLED if name == "forward" else ELSEWHERE,
            )

        del call.__wrapped__
        return call

    def _property(self, name: str, get: Any) -> Any:
        found = get(self)
        if isinstance(found, ALIKE):
            return found
        if self._shown_from is not None and not holds_tensors(found):
            original = getattr(self._shown_from().get_submodule(self._shown_path), name)
            if isinstance(found, type(original)) and bool(original == found):
                return found
        raise self._refuse(
            f"{self._dotted(name)} is a property of {self.__class__.__name__}, and what this rank holds gives another "
            "value than the original",
            "read it from the original module, or from one that has loaded parallel.full_state_dict()",
        )

    # Extra state. Torch asks for it by other names, which only what has one may have.

    def extra_state(self) -> Any:
        """What the original's was when the program was made."""
        found = self._shown_node.extra
        if found is HELD:
            raise self._refuse(
                f"the extra state of {self._shown_path or 'the model'} cannot be told: it is made of parameters, "
                "buffers or values that are not here",
                "let get_extra_state() give plain values; make tensors buffers",
            )
        return found

    def check_extra_state(self, state: Any) -> None:
        """Refuse another than the program was made with."""
        if not same_state(self.extra_state(), state):
            raise self._refuse(
                f"the extra state of {self._shown_path or 'the model'} that is loaded is not the one that its program "
                "was made with",
                "load it into the model before parallelize()",
            )


def same_state(one: Any, other: Any) -> bool:
    """True if two extra states are equal; tuples and lists may stand for each other."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)

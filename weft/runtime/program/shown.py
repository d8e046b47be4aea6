"""Shown: the original's submodules as a parallel module shows them.

In: a Surface. Out: a tree of containers under the names of all submodules. Each says that it is of its original's class
(`isinstance`, `__class__`), since users sort modules and parameters by it. Attributes can be read; one that forward may
read cannot be set, since no program would read it. Other attributes, those of the caller's own, can. A method of the
original's would work on what the rank holds: it is refused when it is called. A property is worked out here, and
refused where the original's is another.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from operator import methodcaller
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules import container

from weft.errors import Refuse, RunError
from weft.runtime.program.own_modes import Change
from weft.runtime.program.read_only import holds_tensors, read_only
from weft.runtime.program.reads import OVER, Reads, kind_of
from weft.runtime.program.stored import Container
from weft.runtime.program.surface import HELD, NO_STATE, Node, Surface, joined, own_classes, set_modes

UNREAD = "make it a buffer (register_buffer) and change its values, pass it to forward, or set it before parallelize()"
AGAIN = "change the model and call weft.parallelize() again: a program is made of its submodules and functions"
VALUES = (
    "change its values: with torch.no_grad(): parameter.copy_(values); or change the model and call "
    "weft.parallelize() again"
)
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules whose forward, or whose users', goes over all children."""
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
OVERRIDES = frozenset(
    {"parameters", "named_parameters", "buffers", "named_buffers", "requires_grad_", "zero_grad", "apply"}
    | {"to", "half", "float", "double", "bfloat16", "cpu", "cuda", "type"}
)
"""Methods of all modules that a class may have as its own."""


class NotHeldError(RunError, AttributeError):
    """A parameter or buffer of the model that this rank does not hold: there is no such attribute here."""


class Answering:
    """Says that it is of another class."""

    _shown_node = Node()

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        kind = self._shown_node.kind
        # torch.compile would trace the original's forward in place of ours
        is_traced = kind is not None and sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo")
        return type(self) if kind is None or is_traced else kind


class Attributes(Answering, nn.Module):
    """A module that shows attributes of the original, to be read."""

    _shown_path = ""
    _refuse: Refuse
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
        return super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Another child, of the caller's own."""
        self._refuse_unread(name, held=True)
        super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Another parameter, of the caller's own."""
        self._refuse_unread(name, held=True)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Another buffer, of the caller's own."""
        self._refuse_unread(name, held=True)
        super().register_buffer(name, tensor, persistent)

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
        if name in node.children or (name not in node.attributes and callable(self._static(name))):
            return self._refuse(f"{found} is set, and programs go on with what they were made of", AGAIN)
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


class Children(dict[str, nn.Module | None]):
    """The submodules that a module shows, by name: those of the original stay what they are."""

    check: Callable[[str], None]
    """Refuses a change under a name."""

    def __setitem__(self, name: str, module: nn.Module | None) -> None:
        self.check(name)
        super().__setitem__(name, module)

    def __delitem__(self, name: str) -> None:
        self.check(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Take one out."""
        self.check(name)
        return super().pop(name, *default)

    def update(self, *given: Any, **named: Any) -> None:
        """Put some in."""
        for name, module in dict(*given, **named).items():
            self[name] = module

    def clear(self) -> None:
        """Take all out."""
        for name in list(self):
            del self[name]

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)


class Shown(Attributes, Container):
    """A submodule of the original as a parallel module shows it."""

    _shown_change: Callable[[str, Change], None] | None = None
    """Sets modes as the original does, if that has its own way."""

    def __init__(self) -> None:
        self.__dict__["_shown_mode"] = [True]
        super().__init__()

    @property
    def training(self) -> bool:
        """Its mode, which several trees may share."""
        return bool(self.__dict__["_shown_mode"][0])

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["_shown_mode"][0] = mode

    def share_mode(self, other: Shown) -> None:
        """Be in the mode of another from now on."""
        self.__dict__["_shown_mode"] = other.__dict__["_shown_mode"]

    def assign_by(self, setters: Mapping[str, Callable[[Any], None]]) -> None:
        """Let buffers be set by these, each by its dotted name."""
        for path, assign in setters.items():
            holder, name = self.holder_of(path)
            holder.__dict__["_assigned"] = {**holder.__dict__.get("_assigned", {}), name: assign}

    def tell_all(self, node: Node, refuse: Refuse, path: str, surface: Surface, change: Any) -> None:
        """Say what the original has here."""
        self.tell(node, refuse, path, surface.original)
        self.__dict__["_shown_change"] = change if surface.own_modes else None
        for name in OVERRIDES:
            method = getattr(node.kind, name, None)
            if method is not getattr(nn.Module, name) and callable(method):
                self.__dict__[name] = self.uncallable(name, method)

    def shows_name(self, name: str) -> bool:
        return name in self._shown_node.attributes or self._static(name) is not MISSING

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Programs call no submodules."""
        return self.uncallable("forward", Shown.forward)()

    def train(self, mode: bool = True) -> Self:
        """As the original's."""
        return self._changed(methodcaller("train", mode)) if self._shown_change is not None else super().train(mode)

    def eval(self) -> Self:
        """As the original's."""
        return self._changed(methodcaller("eval")) if self._shown_change is not None else super().eval()

    def _changed(self, change: Change) -> Self:
        assert self._shown_change is not None
        self._shown_change(self._shown_path, change)
        return self

    def extra_repr(self) -> str:
        """The original's."""
        return self._shown_node.text

    def close(self) -> None:
        """All submodules are there."""
        children = Children(self._modules)
        children.check = self._check_child
        self.__dict__["_modules"] = children

    def _check_child(self, name: str) -> None:
        self._refuse_unread(name, held=True)
        kind = self._shown_node.kind
        if kind is not None and issubclass(kind, LISTS):
            raise self._refuse(f"{self._dotted(name)} is added, and programs go on without it", AGAIN)

    # As a list or dict.

    def _read(self, name: str, *args: Any) -> Any:
        found = self._static(name)
        if found is MISSING:
            return getattr(Container, name)(self, *args)
        is_read = getattr(found, "__module__", "") == container.__name__
        return found(self, *args) if is_read else self.uncallable(name, found)()

    def __getitem__(self, key: Any) -> Any:
        return self._read("__getitem__", key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read("__iter__"))

    def __len__(self) -> int:
        return int(self._read("__len__"))

    def __bool__(self) -> bool:
        return self._static("__len__") is MISSING or bool(len(self))


def shown_tree(surface: Surface, refuse: Refuse, change: Callable[[str, Change], None]) -> Shown:
    """Containers under the names of all submodules, in the modes that they are in.

    Args:
        change: sets modes as a submodule's own `train()` or `eval()` does.
    """
    tree = Shown()
    for path, node in surface.nodes.items():
        holder, _ = tree.holder_of(joined(path, "x"), make=True)
        assert isinstance(holder, Shown)
        holder.tell_all(node, refuse, path, surface, change)
    for path, first in surface.aliases.items():
        holder, name = tree.holder_of(path)
        holder._modules[name] = tree.get_submodule(first)
    set_modes(tree, surface.modes)
    for shown in {id(one): one for one in tree.modules()}.values():
        assert isinstance(shown, Shown)
        shown.close()
    return tree

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
from torch import Tensor, nn
from torch.nn.modules import container

from weft.errors import Refuse, RunError
from weft.runtime.program.own_modes import Change
from weft.runtime.program.read_only import holds_tensors, read_only
from weft.runtime.program.stored import Container
from weft.runtime.program.surface import HELD, NO_STATE, Node, Surface, joined, own_classes, set_modes

UNREAD = "make it a buffer (register_buffer) and change its values, pass it to forward, or set it before parallelize()"
OTHERWISE = (
    "change the model before parallelize(); later on load parallel.full_state_dict() into the model, change it, and "
    "call weft.parallelize() again. Values of parameters change in place: with torch.no_grad(): parameter.copy_(values)"
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
            OTHERWISE,
        )


class Attributes(Answering, nn.Module):
    """A module that shows attributes of the original, to be read."""

    _shown_path = ""
    _shown_from: Callable[[], nn.Module] | None = None
    _assigned: Mapping[str, Callable[[Any], None]] = MappingProxyType({})
    """What sets buffers."""

    def tell(self, node: Node, refuse: Refuse, path: str = "", original: Callable[[], nn.Module] | None = None) -> None:
        """Say what the original has here, and how to refuse a change of it."""
        self.__dict__.update(_refuse=refuse, _shown_path=path, _shown_from=original)
        shown = {
            name: read_only(value, partial(self._unread, name, "changed")) for name, value in node.attributes.items()
        }
        self.__dict__["_shown_node"] = replace(node, attributes=shown)
        if node.extra is not NO_STATE:
            self.__dict__.update(get_extra_state=self.extra_state, set_extra_state=self.check_extra_state)

    def __setattr__(self, name: str, value: Any) -> None:
        if (assign := self._assigned.get(name)) is not None:
            return assign(value)
        if self._shown_node.kind is not None and self._is_unread(name):
            raise self._unread(name)
        if isinstance(value, nn.Module):
            self._refuse_own(name, value)
        return super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        node = self._shown_node
        if node.kind is not None and (self.shows_name(name) or name in node.parameters | node.buffers | node.children):
            raise self._unread(name, "deleted")
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """In place of one of the model's: the next forward tells. No other."""
        self._refuse_own(name, param)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Likewise."""
        self._refuse_own(name, tensor)
        super().register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """One without tensors."""
        if self._shown_node.kind is not None and name in self._shown_node.children:
            raise self._unread(name)
        self._refuse_own(name, module)
        super().add_module(name, module)

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
        message = (
            f"{self._dotted(name)} is {how}, and programs do not read it: they were made with the value that it had"
        )
        node = self._shown_node
        is_held = how == "deleted" or name in node.children | node.parameters or name.lstrip("-").isdigit()
        return self._refuse(message, OTHERWISE if is_held else UNREAD)

    def shows_name(self, name: str) -> bool:
        """True if a name is of the original, and nothing of the runtime's is called so."""
        return name in self._shown_node.attributes or (
            self._static(name) is not MISSING and not any(name in vars(kind) for kind in own_classes(type(self)))
        )

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

    def __setitem__(self, key: Any, value: Any) -> None:
        raise self._unread(str(key))

    def __delitem__(self, key: Any) -> None:
        raise self._unread(str(key), "deleted")

    def __bool__(self) -> bool:
        return self._static("__len__") is MISSING or bool(len(self))


class Items:
    """A parallel module whose original is a list or dict of modules: its items are those of the tree."""

    _items: Shown

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._items[key]

    def __bool__(self) -> bool:
        return True


def with_items(module: Attributes, tree: Shown) -> None:
    """Let a module have the items of a tree, if the original's class has some. Others are not to look like lists."""
    kind = type(module)
    if tree._static("__getitem__") is not MISSING:
        module.__dict__["_items"] = tree
        # what it is in truth: `__class__` is what it shows
        object.__dict__["__class__"].__set__(
            module, type(kind.__name__, (kind, Items), {"__module__": kind.__module__})
        )


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
    return tree

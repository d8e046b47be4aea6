"""Shown: the original's submodules as a parallel module shows them.

In: a Surface. Out: a tree of containers under the names of all submodules (`attributes.py` says what each shows), in
the modes that they are in. The children of the original stay what they are, whichever way they are set; a list or dict
of modules is read as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import methodcaller
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.modules import container

from weft.errors import Refuse
from weft.runtime.checks import shard_rules
from weft.runtime.checks.shard_rules import held_of
from weft.runtime.program.own_modes import Change
from weft.runtime.program.shown.attributes import AGAIN, MISSING, Attributes
from weft.runtime.program.stored import Container
from weft.runtime.program.surface import Node, Surface, joined, set_modes

WHOLE = (
    "parallelize(..., weights=state_dict or file) starts from full tensors, weft.load(folder, parallel) goes on from "
    "what weft.save wrote; later on, with torch.no_grad(), p.copy_(weft.shard_like(full[name], p)) for each of "
    "parallel.named_parameters() sets them, and parallel.norm.running_mean = full['norm.running_mean'] a buffer. "
    "load_state_dict() takes what state_dict() of the same plan gave on this rank"
)
"""Instead of loading full tensors on a rank that holds parts."""
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules whose forward, or whose users', goes over all children."""
OVERRIDES = frozenset(
    {"parameters", "named_parameters", "buffers", "named_buffers", "requires_grad_", "zero_grad", "apply"}
    | {"to", "half", "float", "double", "bfloat16", "cpu", "cuda", "type"}
)
"""Methods of all modules that a class may have as its own."""


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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *told: Any) -> None:
        """Asked by torch. Of what the rank holds in part, full tensors are refused, and parts that lie elsewhere."""
        for name, one in self._parameters.items():
            given, held = state_dict.get(prefix + name), held_of(one)
            if held is None or one is None or not isinstance(given, Tensor):
                continue
            if given.shape != one.shape or shard_rules.joined((one, given)) is None:
                raise self._refuse(
                    f"{self._dotted(name)} is given with shape {list(given.shape)}, and this rank holds {held.shard}",
                    WHOLE,
                )
        super()._load_from_state_dict(state_dict, prefix, *told)

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
    for shown in {id(one): one for one in tree.modules()}.values():
        assert isinstance(shown, Shown)
        shown.close()
    return tree

"""Returns: what a model's forward returns, so that a program's flat tensors can be given back in that form.

In: the pytree spec of the output and its leaves. Out: JSON that any rank reads, and the output built again: tuples,
lists and dicts, named tuples, dataclasses and whatever class is registered with torch's pytree (the outputs of Hugging
Face models are). Classes are found again by module and name.
"""

from __future__ import annotations

import importlib
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Tree = Any
"""None for a leaf; else [kind, class, context, children]."""


class NotReturned(ValueError):  # noqa: N818 - says what happened
    """An output that a program cannot give back."""


@dataclass(frozen=True)
class Returns:
    """The form of an output.

    Args:
        tree: how it nests.
        leaves: for each leaf the place of its tensor among what the program returns, or -1.
        values: the leaves that are no tensors; None where a tensor stands.
    """

    tree: Tree
    leaves: tuple[int, ...]
    values: tuple[Any, ...]

    def build(self, found: Any) -> Any:
        """The output, from what the program returned."""
        if isinstance(found, Mapping):
            found = tuple(found.values())
        tensors: Sequence[Tensor] = (found,) if isinstance(found, Tensor) else found
        rest = iter([value if at < 0 else tensors[at] for at, value in zip(self.leaves, self.values, strict=True)])
        return _built(self.tree, rest)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Returns:
        return Returns(found["tree"], tuple(found["leaves"]), tuple(found["values"]))


def returns_of(spec: pytree.TreeSpec, outputs: Sequence[str | None], values: Sequence[Any]) -> Returns:
    """The form of an output.

    Args:
        outputs: the tensor of each leaf, None for other leaves; a tensor may occur twice.
        values: the other leaves. What is not plain (a cache) becomes None.
    """
    if not any(outputs):
        raise NotReturned("the forward returns no tensor")
    plain = tuple(value if _is_plain(value) else None for value in values)
    order = {name: at for at, name in enumerate(dict.fromkeys(name for name in outputs if name is not None))}
    leaves = tuple(-1 if name is None else order[name] for name in outputs)
    return Returns(_told(spec), leaves, plain)


def lost(values: Sequence[Any]) -> list[str]:
    """Kinds of leaves that are neither tensors nor plain: None stands in their place."""
    return [type(value).__name__ for value in values if not _is_plain(value)]


def _told(spec: pytree.TreeSpec) -> Tree:
    if spec.is_leaf():
        return None
    children = [_told(child) for child in spec.children()]
    kind: Any = spec.type
    if kind in (tuple, list):
        return [kind.__name__, "", None, children]
    if kind is dict:
        return ["dict", "", list(spec.context), children]
    is_named = kind is namedtuple
    cls: Any = spec.context if is_named else kind
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _found(name) is not cls:
        raise NotReturned(f"the forward returns a {cls.__qualname__}, which no other process can import by that name")
    if is_named:
        return ["named", name, None, children]
    if not _is_plain(spec.context):
        raise NotReturned(f"the forward returns a {cls.__qualname__}, whose form cannot be written down")
    return ["node", name, spec.context, children]


def _is_plain(context: Any) -> bool:
    if isinstance(context, list | tuple):
        return all(map(_is_plain, context))
    return isinstance(context, bool | int | float | str | None)


def _found(name: str) -> Any:
    """The class of a name; None if there is none."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for word in path.split("."):
        found = getattr(found, word, None)
    return found


def _built(tree: Tree, rest: Any) -> Any:
    if tree is None:
        return next(rest)
    kind, name, context, inner = tree
    children = [_built(one, rest) for one in inner]
    if kind in ("tuple", "list"):
        return tuple(children) if kind == "tuple" else children
    if kind == "dict":
        return dict(zip(context, children, strict=True))
    cls: type[Any] | None = _found(name)
    assert cls is not None, f"the class {name} of the output is not here"
    if kind == "named":
        return cls(*children)
    if cls not in pytree.SUPPORTED_NODES and is_dataclass(cls):
        torch.export.register_dataclass(cls)
    return pytree.SUPPORTED_NODES[cls].unflatten_fn(children, context)

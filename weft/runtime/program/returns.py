"""Returns: what a model's forward returns, so that a program's flat tensors can be given back in that form.

In: the pytree spec of the output and its leaves. Out: JSON that any rank reads, and the output built again: tuples,
lists and dicts, named tuples, dataclasses and whatever class is registered with torch's pytree (the outputs of Hugging
Face models are). Classes are found again by module and name. Leaves that are no tensors are constants: numbers, words,
dtypes, members of enums, ranges, sets of such. Others, which may hold tensors, are refused; but key-value caches and
other objects of Hugging Face's library become None.
"""

from __future__ import annotations

import importlib
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
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
        values: the leaves that are no tensors, in JSON; None where a tensor stands.
    """

    tree: Tree
    leaves: tuple[int, ...]
    values: tuple[Any, ...]

    def build(self, found: Any) -> Any:
        """The output, from what the program returned."""
        if isinstance(found, Mapping):
            found = tuple(found.values())
        tensors: Sequence[Tensor] = (found,) if isinstance(found, Tensor) else found
        found = [_read(value) if at < 0 else tensors[at] for at, value in zip(self.leaves, self.values, strict=True)]
        # forward was captured on the host: the device that it asked for is that of the run
        rest = iter([tensors[0].device if one == HOST and isinstance(one, torch.device) else one for one in found])
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
        values: the other leaves. Objects of Hugging Face's library (a cache) become None.
    """
    if not any(outputs):
        raise NotReturned("the forward returns no tensor")
    plain = tuple(_leaf(*one) for one in zip(values, _places(spec), strict=True))
    order = {name: at for at, name in enumerate(dict.fromkeys(name for name in outputs if name is not None))}
    leaves = tuple(-1 if name is None else order[name] for name in outputs)
    return Returns(_told(spec), leaves, plain)


def lost(values: Sequence[Any]) -> list[str]:
    """Kinds of leaves in whose place None stands."""
    return [type(value).__name__ for value in values if _is_librarys(value)]


def _leaf(value: Any, place: str) -> Any:
    if _is_librarys(value):
        return None
    try:
        return _written(value)
    except NotReturned:
        what = f"a {type(value).__qualname__}" + (f" at {place}" if place else "")
        raise NotReturned(f"the forward returns {what}, which a program does not give back") from None


def _is_librarys(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("transformers", "transformers_modules") and not isinstance(
        value, Enum
    )


def _places(spec: pytree.TreeSpec) -> Iterator[str]:
    """Where each leaf stands, as an index after the output."""
    if spec.is_leaf():
        yield ""
        return
    children, context = spec.children(), spec.context
    # a registered dataclass tells its fields first
    named = context[0] if isinstance(context, list | tuple) and context and isinstance(context[0], list) else context
    keys = named if isinstance(named, list) and len(named) == len(children) else range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from (f"[{key!r}]{rest}" for rest in _places(child))


def _told(spec: pytree.TreeSpec) -> Tree:
    if spec.is_leaf():
        return None
    children = [_told(child) for child in spec.children()]
    kind: Any = spec.type
    if kind in (tuple, list):
        return [kind.__name__, "", None, children]
    if kind is dict:
        return ["dict", "", _form(list(spec.context), spec), children]
    is_named = kind is namedtuple
    cls: Any = spec.context if is_named else kind
    name = _name(cls)
    if _found(name) is not cls:
        raise NotReturned(f"the forward returns a {cls.__qualname__}, which no other process can import by that name")
    if is_named:
        return ["named", name, None, children]
    return ["node", name, _form(spec.context, spec), children]


def _form(context: Any, spec: pytree.TreeSpec) -> Any:
    try:
        return _written(context)
    except NotReturned:
        raise NotReturned(
            f"the forward returns a {spec.type.__qualname__}, whose form cannot be written down"
        ) from None


HOST = torch.device("cpu")
KINDS: Mapping[type[Any], tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: (list, tuple),
    torch.Size: (list, torch.Size),
    set: (lambda one: sorted(one, key=repr), set),
    frozenset: (lambda one: sorted(one, key=repr), frozenset),
    range: (lambda one: [one.start, one.stop, one.step], lambda of: range(*of)),
    slice: (lambda one: [one.start, one.stop, one.step], lambda of: slice(*of)),
    complex: (lambda one: [one.real, one.imag], lambda of: complex(*of)),
    bytes: (list, bytes),
    torch.device: (str, torch.device),
    **dict.fromkeys(
        (torch.dtype, torch.layout, torch.memory_format),
        (lambda one: str(one).removeprefix("torch."), lambda of: getattr(torch, of)),
    ),
}
"""Kinds of constants that JSON has not: what is written of them, and how they are made of that."""


def _written(value: Any) -> Any:
    """A constant in JSON; refuses what is none."""
    kind = type(value)
    if isinstance(value, Enum):
        if kind.__members__.get(value.name) is value and _found(_name(kind)) is kind:
            return {"enum": [_name(kind), value.name]}
    elif isinstance(value, bool | int | float | str | None):
        return value
    elif kind is list:
        return [_written(one) for one in value]
    elif kind in KINDS:
        return {kind.__name__: _written(KINDS[kind][0](value))}
    raise NotReturned(f"a {kind.__qualname__} is no constant")


def _read(told: Any) -> Any:
    """The constant that was written."""
    if isinstance(told, list):
        return [_read(one) for one in told]
    if not isinstance(told, dict):
        return told
    ((kind, of),) = told.items()
    found = _read(of)
    if kind == "enum":
        return _found(found[0])[found[1]]
    return next(make(found) for one, (_, make) in KINDS.items() if one.__name__ == kind)


def _name(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


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
        return dict(zip(_read(context), children, strict=True))
    cls: type[Any] | None = _found(name)
    assert cls is not None, f"the class {name} of the output is not here"
    if kind == "named":
        return cls(*children)
    if cls not in pytree.SUPPORTED_NODES and is_dataclass(cls):
        torch.export.register_dataclass(cls)
    return pytree.SUPPORTED_NODES[cls].unflatten_fn(children, _read(context))

"""The example and the model's output as flat leaves with names.

Enters: what the user hands over (a tensor, a tuple of positional arguments, a dict of keyword arguments), and what
forward returned. Leaves: leaves, pytree specs, a name for every tensor (from forward's signature), which dims are
dynamic, which output is the loss. Dataclasses are registered with torch's pytree, as `torch.export` asks for. An object
whose text does not say what it holds is refused: whether a later batch has another value could not be told.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from weft.capture.source import is_users, relative
from weft.errors import CaptureError
from weft.runtime.weights.precision import Precision

RAGGED_REMEDY = "pass a padded batch and a mask or lengths, and mask what is padding (torch.where, key_padding_mask)"


ADDRESS = re.compile(r"<(?!function |built-in |bound method |class )[^<>]* at 0x[0-9a-f]+")
"""In the text of an object that does not say its value."""
BY_NAME = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
"""What is known by its name."""


@dataclass(frozen=True)
class Example:
    """The flattened example. `tensors` are positions among the leaves; `wheres` and `names` go with them.

    `precision`: in which the forward is to compute, if not in its own. `grad`: the grad mode that it is told."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    tensors: tuple[int, ...]
    wheres: tuple[str, ...]
    names: tuple[str, ...]
    precision: Precision | None = None
    grad: bool = True

    def arguments(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of forward with these tensors in place of the example's."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.tensors, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.leaves[position] for position in self.tensors)


def flatten_example(module: nn.Module, example: Any) -> Example:
    """The example as leaves; refuses what forward does not take and tensors without values."""
    args, kwargs = split_example(example)
    refuse_ragged(args, kwargs)
    register_dataclasses((args, kwargs))
    found, spec = pytree.tree_flatten_with_path((args, kwargs))
    pairs: list[tuple[Any, Any]] = list(found)
    tops = argument_names(module, args, kwargs)
    tensors, wheres, names = [], [], []
    for position, (path, leaf) in enumerate(pairs):
        top = tops[path[0].idx][path[1].idx if path[0].idx == 0 else path[1].key]
        where = top + pytree.keystr(path[2:])
        if not isinstance(leaf, torch.Tensor):
            refuse_object(leaf, where)
            continue
        if leaf.device.type == "meta":
            raise CaptureError(
                f"input {where} is on the meta device: it has a shape but no values",
                remedy="give an example on the CPU, such as torch.zeros of that shape",
            )
        tensors.append(position)
        wheres.append(where)
        names.append(".".join([top, *(key_name(key) for key in path[2:])]))
    return Example(tuple(leaf for _, leaf in pairs), spec, tuple(tensors), tuple(wheres), tuple(names))


def refuse_object(leaf: Any, where: str) -> None:
    """Refuse an argument that is no tensor if its text does not say its value: it may be another one in later calls."""
    kind = f"a {type(leaf).__module__}.{type(leaf).__qualname__}"
    if isinstance(leaf, nn.Module):
        raise CaptureError(
            f"argument {where} of the example is a module ({kind}): its parameters would be constants of the program",
            remedy="keep it in the model, as a submodule (frozen by requires_grad_(False) if it is not trained), or "
            "pass what it gives as a tensor",
        )
    if isinstance(leaf, BY_NAME):
        return
    held = holds_any_tensor(leaf)
    if not held and ADDRESS.search(repr(leaf)) is None:
        return
    why = "holds tensors that are not seen" if held else "does not say its value: a later call could have another one"
    remedy = "pass what forward reads of it as arguments of their own, or in a plain dict, a tuple, or a dataclass "
    if held and isinstance(leaf, Mapping):
        remedy = "pass a plain dict, dict(batch), which forward reads by key, or a dataclass "
    raise CaptureError(
        f"argument {where} of the example is {kind}, which {why}",
        remedy=f"{remedy}(torch.export.register_dataclass)" if held else f"{remedy}of plain values and tensors",
    )


def holds_any_tensor(leaf: Any) -> bool:
    """Whether an object that pytree does not see into has tensors or modules in its attributes or as a container."""
    inner = [vars(leaf)] if hasattr(leaf, "__dict__") else []
    if isinstance(leaf, Mapping):
        inner.append({str(key): value for key, value in leaf.items()})
    elif isinstance(leaf, list | tuple | set | frozenset):
        inner.append(dict(enumerate(leaf)))
    return any(isinstance(one, torch.Tensor | nn.Module) for one in pytree.tree_leaves(inner))


def refuse_ragged(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Packed sequences and nested tensors have rows of lengths that only their values tell."""
    for leaf in pytree.tree_leaves((args, dict(kwargs)), is_leaf=lambda one: isinstance(one, PackedSequence)):
        if isinstance(leaf, PackedSequence) or (isinstance(leaf, torch.Tensor) and leaf.is_nested):
            kind = "packed sequence" if isinstance(leaf, PackedSequence) else "nested tensor"
            raise CaptureError(f"the example holds a {kind}: its shape depends on values", remedy=RAGGED_REMEDY)


def split_example(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """tuple: positional arguments; a mapping: keyword arguments; a tensor: the only argument."""
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), {str(key): value for key, value in example.items()}
    if isinstance(example, tuple | list):
        return tuple(example), {}
    raise CaptureError(
        f"the example is a {type(example).__name__}",
        remedy="give a tuple of positional arguments, a dict of keyword arguments, or one tensor",
    )


def argument_names(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[int, str], dict[str, str]]:
    """Names of positional arguments by position, and of keyword arguments by key."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"the example does not fit {type(module).__name__}.forward{signature}: {error}",
            place=forward_place(module),
            remedy="a tuple gives positional arguments in order, a dict gives keyword arguments by name",
        ) from None
    names: dict[int, str] = {}
    for parameter in signature.parameters.values():
        if len(names) >= len(args):
            break
        if parameter.kind is parameter.VAR_POSITIONAL:
            names |= {i: f"{parameter.name}.{k}" for k, i in enumerate(range(len(names), len(args)))}
        else:
            names[len(names)] = parameter.name
    return names, {key: key for key in kwargs}


def forward_place(module: nn.Module) -> str:
    """Where a module's forward is written; the name of its class if that is torch's."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    if code is None or not is_users(code.co_filename):
        return type(module).__qualname__
    return f"{relative(code.co_filename)}:{code.co_firstlineno}"


def forward_file(module: nn.Module) -> str:
    """The file that a module's forward is written in; "" if it is not written in Python."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return "" if code is None else str(code.co_filename)


def key_name(key: Any) -> str:
    """One step of a pytree path as part of a dotted name."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def register_dataclasses(tree: Any) -> None:
    """Let pytree see into the dataclasses of a tree, as `torch.export.register_dataclass` does."""
    while unknown := {type(leaf) for leaf in pytree.tree_leaves(tree) if holds_tensor(leaf)}:
        for kind in unknown:
            torch.export.register_dataclass(kind)


def holds_tensor(leaf: Any) -> bool:
    """Whether a leaf is a dataclass with tensors in it, possibly deeper down."""
    if not is_dataclass(leaf) or isinstance(leaf, type | torch.Tensor):
        return False
    inner = pytree.tree_leaves([getattr(leaf, item.name) for item in fields(leaf)])
    return any(isinstance(item, torch.Tensor) or holds_tensor(item) for item in inner)


@dataclass(frozen=True)
class Output:
    """What forward returned: for each leaf whether it is a tensor, the spec, the position of the loss, the leaves that
    are no tensors."""

    tensors: tuple[bool, ...]
    spec: pytree.TreeSpec
    loss: int | None
    leaves: tuple[Any, ...] = ()
    """None where a tensor stands."""

    @property
    def loss_among_tensors(self) -> int | None:
        """The position of the loss among the tensors alone."""
        return None if self.loss is None else sum(self.tensors[: self.loss])


def flatten_output(output: Any) -> tuple[Output, list[torch.Tensor]]:
    register_dataclasses(output)
    leaves, spec = pytree.tree_flatten(output)
    loss = find_loss(output)
    position = next((i for i, leaf in enumerate(leaves) if loss is not None and leaf is loss), None)
    kinds = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
    others = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return Output(kinds, spec, position, others), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def find_loss(output: Any) -> torch.Tensor | None:
    """`.loss`, `["loss"]`, or the only scalar that has a gradient. Of several scalars none is the loss: taking one of
    them would train another model than the user's own loop does."""
    named = output["loss"] if isinstance(output, Mapping) and "loss" in output else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named if is_scalar(named) else None
    found = {id(leaf): leaf for leaf in pytree.tree_leaves(output) if is_scalar(leaf)}
    trained = [leaf for leaf in found.values() if leaf.requires_grad] or list(found.values())
    return trained[0] if len(trained) == 1 else None


def is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


MARK = "_weft_dynamic"
"""The attribute of an example's tensor that holds its marked dims."""


def dynamic(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    """Mark dims of an example's tensor whose size may vary from batch to batch; the tensor itself.

    Marked dims of several inputs that have the same place and the same size in the example are one size: tokens and
    targets grow together. `torch._dynamo.mark_dynamic(tensor, dim)` says the same.

    Example:
        >>> tokens = dynamic(torch.zeros(4, 16, dtype=torch.long), 0, 1)
    """
    wrong = [dim for dim in dims if not -tensor.dim() <= dim < tensor.dim()]
    if wrong or not dims:
        raise CaptureError(
            f"dynamic: a tensor of {tensor.dim()} dims has no dim {wrong[0]}" if wrong else "dynamic: no dim is given",
            remedy="weft.dynamic(tensor, 0, 1) marks the first two dims",
        )
    setattr(tensor, MARK, frozenset(getattr(tensor, MARK, ())) | {dim % tensor.dim() for dim in dims})
    return tensor


def marked(example: Example) -> dict[str, tuple[int, ...]]:
    """The dims that are marked on the example's tensors, by position."""
    return {str(i): dims for i, value in enumerate(example.values) if (dims := marks_of(value))}


def is_marked(example: Any) -> bool:
    """True if a tensor of an example has a marked dim."""
    leaves = pytree.tree_leaves(example)
    return any(marks_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))


def marks_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The marked dims of a tensor."""
    return tuple(sorted({*getattr(tensor, MARK, ()), *getattr(tensor, "_dynamo_dynamic_indices", ())}))


def dynamic_shapes(example: Example, dynamic: Mapping[str, tuple[int, ...]]) -> list[dict[int, Any] | None]:
    """What export wants for the dynamic dims; refuses unknown inputs and dims of size 0 or 1."""
    wanted: dict[int, tuple[int, ...]] = {}
    for name, dims in dynamic.items():
        positions = [i for i in range(len(example.names)) if name in (example.names[i], example.wheres[i], str(i))]
        if not positions:
            raise CaptureError(
                f"dynamic names {name!r}, which is no tensor of the example",
                remedy=f"one of {', '.join(example.names)}, or a position from 0",
            )
        wanted[positions[0]] = tuple(dims)
    specs: list[dict[int, Any] | None] = []
    for i, value in enumerate(example.values):
        for dim in wanted.get(i, ()):
            if not -value.dim() <= dim < value.dim():
                raise CaptureError(f"dynamic: {example.names[i]} has {value.dim()} dims, so there is no dim {dim}")
            if value.shape[dim] < 2:
                raise CaptureError(
                    f"dynamic dim {dim} of {example.names[i]} has size {value.shape[dim]} in the example",
                    remedy="an example with at least 2 there: sizes 0 and 1 behave unlike all others",
                )
        sorted_dims = sorted({dim % value.dim() for dim in wanted.get(i, ())})
        specs.append(dict.fromkeys(sorted_dims, torch.export.Dim.DYNAMIC) or None)
    return specs

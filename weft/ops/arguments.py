"""An op's arguments by name, as the operator's schema declares them.

In: an Op, whose arguments stand in args and kwargs as captured. Out: a mapping from the schema's argument names to
values, defaults filled in, tensor operand i as `Ref(str(i))`; and calls with some arguments replaced.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from weft.ir.graph import Graph, Op, Ref, map_refs, refs
from weft.ops.rule import Call

Numbered = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]


@cache
def overload(target: str) -> torch._ops.OpOverload | None:
    """The operator behind `aten.add.Tensor`; None for an opaque function or an unknown name."""
    words = target.split(".")
    if len(words) != 3 or target.startswith(("function:", "weft.")):
        return None
    found: Any = torch.ops
    for word in words:
        try:
            found = getattr(found, word)
        except (AttributeError, RuntimeError):  # torch raises either for a name it does not know
            return None
    return found if isinstance(found, torch._ops.OpOverload) else None


def family(op: Op) -> str:
    """The target without its overload: `aten.add` of `aten.add.Tensor`."""
    return ".".join(op.target.split(".")[:2])


def numbered(op: Op) -> Numbered:
    """The op's own arguments, tensor operand i as `Ref(str(i))`."""
    counter = itertools.count()

    def change(_: Ref) -> Ref:
        return Ref(str(next(counter)))

    args = map_refs(op.args, change)
    return args, tuple((name, map_refs(value, change)) for name, value in op.kwargs)


def arguments(op: Op) -> dict[str, Any]:
    """Every argument by its name in the schema, defaults filled in.

    >>> x = Op("relu", "aten.sum.dim_IntList", (Ref("x"), (1,)), (), ("y",))
    >>> arguments(x)
    {'self': Ref(name='0'), 'dim': (1,), 'keepdim': False, 'dtype': None}
    """
    operator = overload(op.target)
    assert operator is not None, f"{op.target} has no schema"
    args, kwargs = numbered(op)
    return bound(operator, args, dict(kwargs))


def bound(operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the schema, defaults filled in, None where there is no default."""
    schema = operator._schema.arguments
    return {one.name: one.default_value for one in schema} | dict(
        zip((one.name for one in schema), args, strict=False), **kwargs
    )


def operand(value: Any) -> int | None:
    """The position of a tensor operand among the op's inputs; None for anything else."""
    return int(value.name) if isinstance(value, Ref) else None


def operands_in(value: Any) -> tuple[int, ...]:
    """Positions of all tensor operands in an argument (a list of tensors, say)."""
    return tuple(int(ref.name) for ref in refs(value))


def integers(value: Any) -> tuple[int, ...]:
    """A list of sizes or dims; one number counts as a list of one, None as an empty one."""
    if value is None:
        return ()
    if isinstance(value, Sequence):
        return tuple(int(item) for item in value)
    return (int(value),)


def positive(position: Any, num_dims: int) -> int:
    """A dim counted from the left."""
    found = int(position)
    return found + max(num_dims, 1) if found < 0 else found


def call_with(op: Op, **changes: Any) -> Call:
    """The op's own call with some arguments, named as in the schema, replaced or added."""
    args, kwargs = numbered(op)
    if not changes:
        return Call(op.target, args, kwargs)
    operator = overload(op.target)
    assert operator is not None, f"{op.target} has no schema"
    names = [argument.name for argument in operator._schema.arguments]
    new_args = tuple(changes.pop(name, value) for name, value in zip(names, args, strict=False))
    new_kwargs = {name: changes.pop(name, value) for name, value in kwargs}
    return Call(op.target, new_args, (*new_kwargs.items(), *changes.items()))


def call(target: str, *args: Any, **kwargs: Any) -> Call:
    """A Call written as a call."""
    return Call(target, args, tuple(kwargs.items()))


def signature(op: Op, graph: Graph) -> Hashable:
    """Equal for ops that call the same operator with equal arguments, on tensors of equal shapes and dtypes."""

    def frozen(arg: Any) -> Hashable:
        if isinstance(arg, Ref):
            one = graph.tensors[arg.name]
            return ("tensor", one.sizes, one.dtype, one.needs_grad)
        if isinstance(arg, tuple | list):
            return tuple(map(frozen, arg))
        return (type(arg), arg) if isinstance(arg, Hashable) else repr(arg)

    function = getattr(op.function, "cls", op.function)
    makes = tuple((graph.tensors[name].sizes, graph.tensors[name].dtype) for name in op.outputs)
    return op.target, function, frozen(op.args), frozen(op.kwargs), makes

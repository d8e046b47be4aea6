"""An op's arguments by name, as the operator's schema declares them.

In: an Op, whose arguments stand in args and kwargs as captured. Out: a mapping from the schema's argument names to
values, defaults filled in, tensor operand i as `Ref(str(i))`; and calls with some arguments replaced.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from weft.ir.graph import Op, Ref, map_refs, refs
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
    given = dict(kwargs)
    found: dict[str, Any] = {}
    for position, argument in enumerate(operator._schema.arguments):
        if position < len(args):
            found[argument.name] = args[position]
        else:
            found[argument.name] = given.get(argument.name, argument.default_value)
    return found


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


def call_with(op: Op, changes: Mapping[str, Any], target: str = "") -> Call:
    """The op's own call with some arguments, named as in the schema, replaced or added."""
    operator = overload(op.target)
    assert operator is not None, f"{op.target} has no schema"
    args, kwargs = numbered(op)
    names = [argument.name for argument in operator._schema.arguments]
    left = dict(changes)
    new_args = tuple(left.pop(name, value) for name, value in zip(names, args, strict=False))
    new_kwargs = {name: left.pop(name, value) for name, value in kwargs}
    return Call(target or op.target, new_args, (*new_kwargs.items(), *left.items()))

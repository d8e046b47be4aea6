"""What the rules of algorithms share: the communicators a cell needs, and calls that stay as they are.

In: an op, a cell and the names that an algorithm may cut. Out: `Group`s for those that are cut, the op's own call where
none is, and rules that know their exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from weft.ir.graph import Op
from weft.ops.arguments import call_with
from weft.ops.rule import Call, CellView, Dims, Exchange, Group, Local, Rule

Told = Callable[[Op, CellView, tuple[Group, ...]], Call]
"""A cell's call, given the communicators of the algorithm's names that are cut."""


def own_call(op: Op) -> Call:
    """The op's call as it stands."""
    return call_with(op, {})


def names_of(dims: Dims) -> tuple[str, ...]:
    """The names of some dims, in order."""
    return tuple(f for one in dims for factors in one.products for f in factors if isinstance(f, str))


def groups(cell: CellView, names: Iterable[str]) -> tuple[Group, ...]:
    """Communicators of those names that are cut."""
    return tuple(Group(name) for name in names if name in cell.cut)


def told_when_cut(names: Collection[str], call: Told) -> Local:
    """`call` where one of the names is cut, the op's own call elsewhere."""

    def local(op: Op, cell: CellView) -> Call:
        found = groups(cell, names)
        return call(op, cell, found) if found else own_call(op)

    return local


def with_exchange(rule: Rule, exchanges: Mapping[str, Exchange]) -> Rule:
    """The rule with algorithms for those names that its op has."""
    found = {name: exchange for name, exchange in exchanges.items() if name in rule.sizes}
    return replace(rule, algorithms=found, source="algorithm" if found else rule.source)


def is_empty(cell: CellView) -> bool:
    """True if some operand of the cell holds nothing: not every ATen operator takes that."""
    return any(math.prod(cell.input_shape(i)) == 0 for i in range(len(cell.inputs)))


def call(target: str, *args: Any, **kwargs: Any) -> Call:
    """A Call written as a call."""
    return Call(target, args, tuple(kwargs.items()))

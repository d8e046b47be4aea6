"""Sizes that may vary: expressions over them, what they must fulfil, and tables that depend on them.

    FreeSize  := name, the input and dim that give it, step, rest: it must be rest + a multiple of step
    expression := names, whole numbers, + - * // % **, comparisons, min and max

In: the sizes of a batch by name. Out: numbers. One program serves all sizes that fulfil its conditions; others are
refused by `refused`, with the reason.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SIZE = "size"
"""The key of an expression in a table: `{"size": "batch // 2"}`."""

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max, "Min": min, "Max": max}


def evaluate(text: str, sizes: Mapping[str, int]) -> Any:
    """The value of an expression.

    >>> evaluate("batch // 2 * length + 1", {"batch": 4, "length": 8})
    17
    """
    return _value(ast.parse(text, mode="eval").body, sizes)


def _value(node: ast.expr, sizes: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name) if name in sizes:
            return sizes[name]
        case ast.BinOp() if type(node.op) in _BINARY:
            return _BINARY[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, sizes)
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, sizes)
        case ast.BoolOp():
            values = [bool(_value(one, sizes)) for one in node.values]
            return all(values) if isinstance(node.op, ast.And) else any(values)
        case ast.Compare() if all(type(one) in _COMPARE for one in node.ops):
            sides = [_value(one, sizes) for one in (node.left, *node.comparators)]
            return all(_COMPARE[type(one)](a, b) for one, a, b in zip(node.ops, sides, sides[1:], strict=False))
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS and not node.keywords:
            return _CALLS[name](*(_value(one, sizes) for one in node.args))
    raise ValueError(f"no expression over {', '.join(sizes) or 'no sizes'}: {ast.unparse(node)}")


@dataclass(frozen=True)
class FreeSize:
    """A size that batches choose.

    Args:
        name: in the program.
        leaf, where, dim: the input that gives it: its place among the leaves of a batch, in words, and its dim.
        step, rest: it must be `rest` more than a multiple of `step`.
        example: its value in the example.
    """

    name: str
    leaf: int
    where: str
    dim: int
    step: int
    rest: int
    example: int


@dataclass(frozen=True)
class Guard:
    """A condition that forward's own decisions, or its operators, put on the sizes. `place`: the line that does."""

    text: str
    place: str = ""


def refused(sizes: Sequence[FreeSize], guards: Sequence[Guard], given: Mapping[str, int]) -> str | None:
    """Why these sizes are not served; None if they are."""
    for one in sizes:
        size, what = given[one.name], f"{one.where} of the batch has {given[one.name]} in dim {one.dim}"
        if size < 2:
            return f"{what} ({one.name}); the program serves sizes from 2 on: 0 and 1 behave unlike all others"
        if size % one.step != one.rest:
            rest = f"{one.rest} more than " if one.rest else ""
            return (
                f"{what} ({one.name}), which the plan cuts: it must be {rest}a multiple of {one.step}, as the "
                f"example's {one.example} is; pad or cut the batch, or plan for an example of that kind"
            )
    for guard in guards:
        if not evaluate(guard.text, given):
            told = ", ".join(f"{name}={size}" for name, size in given.items())
            at = f" (at {guard.place})" if guard.place else ""
            return (
                f"the batch has {told}, and the program was made for {guard.text}{at}: give an example of these sizes"
            )
    return None


def is_sized(table: Any) -> bool:
    """True if a table holds an expression."""
    if isinstance(table, Mapping):
        return SIZE in table or any(map(is_sized, table.values()))
    return isinstance(table, list | tuple) and any(map(is_sized, table))


def worked_out(table: Any, sizes: Mapping[str, int]) -> Any:
    """A table with its expressions as numbers."""
    if isinstance(table, Mapping):
        if SIZE in table:
            return evaluate(table[SIZE], sizes)
        return {key: worked_out(value, sizes) for key, value in table.items()}
    return [worked_out(value, sizes) for value in table] if isinstance(table, list | tuple) else table


class SizedTables:
    """Tables of one rank that depend on sizes, each worked out once for the sizes it is asked for.

    Args:
        names: of the sizes, in the order in which they are given.
        tables: by section and key, as they stand in the file.
        read: makes of a table with numbers what the program uses, by section.
    """

    def __init__(
        self, names: Sequence[str], tables: Mapping[tuple[str, str], Any], read: Mapping[str, Callable[[Any], Any]]
    ) -> None:
        self._names, self._tables, self._read = tuple(names), tables, read
        self._known: dict[tuple[str, str, tuple[int, ...]], Any] = {}

    def at(self, section: str, key: str, sizes: tuple[int, ...]) -> Any:
        """What a table holds at these sizes."""
        if (section, key, sizes) not in self._known:
            given = dict(zip(self._names, sizes, strict=True))
            self._known[section, key, sizes] = self._read[section](worked_out(self._tables[section, key], given))
        return self._known[section, key, sizes]

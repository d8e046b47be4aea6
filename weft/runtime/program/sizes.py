"""Sizes that may vary: expressions over them, what they must fulfil, and tables that depend on them.

    FreeSize  := name, the input and dim that give it, step, rest: it must be rest + a multiple of step
    expression := names, whole numbers, + - * // % **, comparisons, min and max

In: the sizes of a batch by name. Out: numbers. One program serves all sizes that fulfil its conditions; others are
refused by `refused`, with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

SIZE = "size"
"""The key of an expression in a table: `{"size": "batch // 2"}`."""

_EXPRESSION = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call),
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.Not, ast.boolop, ast.cmpop),
)
"""What an expression is made of: nothing that could reach beyond the sizes."""
_CALLS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max, "Min": min, "Max": max}


def evaluate(text: str, sizes: Mapping[str, int]) -> Any:
    """The value of an expression.

    >>> evaluate("batch // 2 * length + 1", {"batch": 4, "length": 8})
    17
    """
    code, names = _compiled(text)
    if code is None or not names <= sizes.keys():
        raise ValueError(f"no expression over {', '.join(sizes) or 'no sizes'}: {text}")
    return eval(code, {"__builtins__": {}, **_CALLS}, dict(sizes))


@cache
def _compiled(text: str) -> tuple[CodeType | None, frozenset[str]]:
    """The code of an expression, None if it is none, and the names of sizes in it."""
    tree = ast.parse(text, mode="eval")
    nodes = list(ast.walk(tree))
    plain = all(isinstance(one, _EXPRESSION) for one in nodes)
    numbers = all(isinstance(one.value, int) for one in nodes if isinstance(one, ast.Constant))
    names = frozenset(one.id for one in nodes if isinstance(one, ast.Name) and one.id not in _CALLS)
    return compile(tree, "<size>", "eval") if plain and numbers else None, names


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

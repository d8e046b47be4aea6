"""Text: literals, calls and statements as `ruff format` would leave them, at 120 columns.

In: expressions as text. Out: lines. A statement that does not fit is broken inside its last bracket: first all
arguments on one line of their own, then one per line with a comma after the last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft.ir.graph import Size

WIDTH = 120
TAB = "    "


def literal(value: Any) -> str:
    """A value as it stands in the text.

    >>> literal(-3.4e38)
    '-3.4e38'
    """
    match value:
        case Size():
            return str(value.hint)
        case float() if math.isinf(value) or math.isnan(value):
            return f'float("{value}")'
        case float():
            return str(value).replace("e+", "e")  # as formatters have it
        case str():
            return json.dumps(value)
        case torch.device():
            return "self.device"
        case tuple() | list():
            return tuple_of(map(literal, value))
        case dict():
            return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
        case None | bool() | int() | complex() | torch.dtype() | torch.memory_format() | torch.layout():
            return str(value)
        case _:
            raise TypeError(f"{type(value).__name__} cannot be written as text")


def tuple_of(items: Iterable[str]) -> str:
    """A tuple; a comma after a single item."""
    found = list(items)
    return f"({found[0]},)" if len(found) == 1 else f"({', '.join(found)})"


def statement(head: str, arguments: Sequence[str], tail: str, indent: int, comment: str = "") -> list[str]:
    """`head(arguments)tail  # comment`, broken if it does not fit. `head` ends with the opening bracket."""
    pad = TAB * indent
    note = f"  # {comment}" if comment else ""
    line = f"{pad}{head}{', '.join(arguments)}{tail}"
    if len(line) + len(note) <= WIDTH:
        return [line + note]
    inner = f"{pad}{TAB}{', '.join(arguments)}"
    if not arguments or len(line) <= WIDTH:
        return [line]  # only the comment is too long
    if len(inner) <= WIDTH and _calls(head):
        return [f"{pad}{head}", inner, f"{pad}{tail}{note}"]
    items = [line for one in arguments for line in _item(one, indent + 1)]
    return [f"{pad}{head}", *items, f"{pad}{tail}{note}"]


def _calls(head: str) -> bool:
    """True if the last bracket opens a call, not a collection: the items of one never share a line."""
    return len(head) > 1 and (head[-2].isalnum() or head[-2] in "_)]")


def _item(argument: str, indent: int) -> list[str]:
    """One argument on lines of its own, with a comma."""
    opening = last_bracket(argument)
    if len(TAB * indent + argument) < WIDTH or opening < 0:
        return [f"{TAB * indent}{argument},"]
    return statement(argument[: opening + 1], top_level(argument[opening + 1 : -1]), argument[-1] + ",", indent)


def top_level(text: str) -> list[str]:
    """The arguments in a text, cut at commas outside of brackets and strings.

    >>> top_level('a, f(b, c), "d, e"')
    ['a', 'f(b, c)', '"d, e"']
    """
    out, depth, quoted, start = [], 0, False, 0
    for i, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    rest = text[start:].strip()
    return [*out, rest] if rest else out


def assign(targets: str, expression: str, indent: int, comment: str = "") -> list[str]:
    """`targets = expression`, broken inside the expression's last bracket if it does not fit."""
    head = f"{targets} = " if targets else ""
    opening = last_bracket(expression)
    if opening < 0:
        return statement(head + expression, (), "", indent, comment)
    inside = expression[opening + 1 : -1]
    return statement(head + expression[: opening + 1], top_level(inside), expression[-1], indent, comment)


def last_bracket(expression: str) -> int:
    """Where the bracket opens that the expression ends with; -1 if it does not end with one."""
    if not expression or expression[-1] not in ")]":
        return -1
    depth, quoted = 0, False
    for i in range(len(expression) - 1, -1, -1):
        character = expression[i]
        if character == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif character in ")]}":
            depth += 1
        elif character in "([{":
            depth -= 1
            if depth == 0:
                return i
    return -1

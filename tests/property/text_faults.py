"""Faults seeded into the text of generated programs: each edit changes one thing, as a hand edit would.

`edited(text, rng)` returns what was done and the new text, or None where the kind finds nothing to change. Whether an
edit matters is for the caller to find out: some do not.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator

STALE = """

_KEPT = {}


def _stale(owner, name, value):
    kept = _KEPT.setdefault((id(owner), name), value.detach().clone())
    return kept + (value - value.detach())
"""
"""Gives the value that a weight had when it was first read, with the gradient of the weight as it is."""


class Text:
    """A program's text, with its methods parsed."""

    def __init__(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    @property
    def functions(self) -> list[ast.FunctionDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)]

    def inside(self, kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> list[ast.AST]:
        """Nodes of that kind in the bodies of methods."""
        bodies = [statement for function in self.functions for statement in function.body]
        return [node for statement in bodies for node in ast.walk(statement) if isinstance(node, kind)]

    def of(self, node: ast.AST) -> str:
        start, stop = self._span(node)
        return self.text[start:stop]

    def put(self, *changes: tuple[ast.AST, str]) -> str:
        """The text with other words for some nodes, none of them within another."""
        text = self.text
        for node, new in sorted(changes, key=lambda one: self._span(one[0]), reverse=True):
            start, stop = self._span(node)
            text = text[:start] + new + text[stop:]
        return text

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )


Edit = Callable[[Text, random.Random], str | None]


def edited(text: str, rng: random.Random) -> tuple[str, str] | None:
    """One edit of a random kind."""
    name = rng.choice(sorted(EDITS))
    new = EDITS[name](Text(text), rng)
    return None if new is None or new == text else (name, new)


def _subject(call: ast.Call) -> ast.expr | None:
    """What a call is about: the tensor whose method it is, else its first argument."""
    if isinstance(call.func, ast.Attribute) and not _is_owner(call.func.value):
        return call.func.value
    return call.args[0] if call.args and isinstance(call.args[0], ast.expr) else None


def _is_owner(node: ast.expr) -> bool:
    """`F`, `torch`, `self.comm`: no tensor."""
    return ast.unparse(node).split(".")[0] in ("F", "torch", "self", "math")


def _calls(text: Text) -> Iterator[tuple[ast.Call, ast.expr]]:
    for node in text.inside(ast.Call):
        assert isinstance(node, ast.Call)
        about = _subject(node)
        if about is not None:
            yield node, about


def drop_call(text: Text, rng: random.Random) -> str | None:
    found = list(_calls(text))
    if not found:
        return None
    call, about = rng.choice(found)
    return text.put((call, text.of(about)))


def double_call(text: Text, rng: random.Random) -> str | None:
    found = list(_calls(text))
    if not found:
        return None
    call, about = rng.choice(found)
    return text.put((about, text.of(call)))


def drop_statement(text: Text, rng: random.Random) -> str | None:
    found = [
        one for one in text.inside((ast.Assign, ast.Expr)) if not isinstance(getattr(one, "value", 0), ast.Constant)
    ]
    return text.put((rng.choice(found), "pass")) if found else None


def wrong_axis(text: Text, rng: random.Random) -> str | None:
    """Another number, another axis, or none; in the tables at the head too."""
    found = [node for node in ast.walk(text.tree) if isinstance(node, ast.Constant) and type(node.value) in (int, str)]
    axes = sorted(
        {
            str(key.value)
            for node in ast.walk(text.tree)
            if isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "GRID"
            and isinstance(node.value, ast.Dict)
            for key in node.value.keys
            if isinstance(key, ast.Constant)
        }
    )
    found = [node for node in found if type(node.value) is int or node.value in axes]
    if not found:
        return None
    node = rng.choice(found)
    if isinstance(node.value, int):
        return text.put((node, repr(node.value + rng.choice([-1, 1]))))
    return text.put((node, rng.choice([*(repr(axis) for axis in axes if axis != node.value), "None", "()"])))


def swap_operands(text: Text, rng: random.Random) -> str | None:
    pairs: list[tuple[ast.expr, ast.expr]] = [
        (node.left, node.right) for node in text.inside(ast.BinOp) if isinstance(node, ast.BinOp)
    ]
    pairs += [
        (node.args[0], node.args[1])
        for node in text.inside(ast.Call)
        if isinstance(node, ast.Call) and len(node.args) > 1
    ]
    if not pairs:
        return None
    first, second = rng.choice(pairs)
    return text.put((first, text.of(second)), (second, text.of(first)))


def stale_weight(text: Text, rng: random.Random) -> str | None:
    """A parameter, as it is stored or as it was brought to where it is used."""
    ends = ("weight", "bias", "running_mean", "running_var")
    stored = [node for node in text.inside(ast.Attribute) if isinstance(node, ast.Attribute) and node.attr in ends]
    used = [
        node
        for node in text.inside(ast.Name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id.endswith(ends)
    ]
    found: list[ast.AST] = [*stored, *used]
    if not found:
        return None
    node = rng.choice(found)
    words = text.of(node)
    owner = words.split(".")[0] if "." in words else "self"
    return text.put((node, f"_stale({owner}, {words!r}, {words})")) + STALE


def other_value(text: Text, rng: random.Random) -> str | None:
    """A name of the same method in the place of another."""
    function = rng.choice(text.functions)
    names = [
        node for one in function.body for node in ast.walk(one) if isinstance(node, ast.Name) and node.id != "self"
    ]
    read = [node for node in names if isinstance(node.ctx, ast.Load)]
    made = sorted(
        {node.id for node in names if isinstance(node.ctx, ast.Store)} | {one.arg for one in function.args.args[1:]}
    )
    return text.put((rng.choice(read), rng.choice(made))) if read and made else None


EDITS: dict[str, Edit] = {
    "drop call": drop_call,
    "double call": double_call,
    "drop statement": drop_statement,
    "wrong axis": wrong_axis,
    "swap operands": swap_operands,
    "stale weight": stale_weight,
    "other value": other_value,
}

"""Lines: what a generated program is doing, for messages and for profilers.

In: the text of a program that is loaded. Out: the user's line that it carries out now; and, while a profiler of torch
runs, ranges: of collectives, and around the statements of each module and line. Promised: the text is not changed for
that: while a profiler runs the same statements run in functions made of it, and nothing of this is there otherwise.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import FrameType, FunctionType
from typing import Any

from torch.autograd import profiler

MODULES = "weft_program_"
"""How the names of modules begin that programs are loaded as."""
NO_RANGE = nullcontext()
WITHIN = "module_that_it_is_in"


def span(*words: object) -> AbstractContextManager[Any]:
    """A range of the profiler, called by these words, if one runs."""
    if not profiler._is_profiler_enabled:
        return NO_RANGE
    return profiler.record_function(" ".join(filter(None, map(str, words))))


def place_here() -> str:
    """The user's line that the program whose code is running carries out, and the program's own."""
    return _place_in(sys._getframe(1))


def place_of(thread: int) -> str:
    """The same of another thread."""
    return _place_in(sys._current_frames().get(thread))


def _place_in(frame: FrameType | None) -> str:
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(MODULES):
            return _place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


@cache
def _place(file: str, line: int) -> str:
    lines, own = linecache.getlines(file), f"{file.rpartition('>/')[2]}:{line}"
    for text in reversed(lines[:line]):
        if text.startswith("    def "):
            break
        if (said := _said(text)) is not None:
            return f"{said} ({own})"
    return own


def _said(line: str) -> str | None:
    """The place in a comment of a program, `model.py:12`; None if the line is none."""
    words = line.split()
    return words[1] if len(words) > 1 and words[0] == "#" else None


# Ranges of a program's statements.


def ranged(program: Any, model: Any) -> AbstractContextManager[None]:
    """While a program's forward runs: ranges if a profiler does."""
    return _ranged(program, model) if profiler._is_profiler_enabled else NO_RANGE


def within(program: Any, what: str) -> str:
    """Words that say too which module a program is in, if it has ranges."""
    path = vars(program).get(WITHIN) if profiler._is_profiler_enabled else ""
    return f"{what} in {path}" if path else what


@contextmanager
def _ranged(program: Any, model: Any) -> Iterator[None]:
    """The program's functions have ranges."""
    cls, own = type(program), vars(program)
    functions = _with_ranges(cls.forward, cls.__name__)
    paths = {id(module): path for path, module in model.named_modules()}

    def within(path: str, place: str, layer: Any = None) -> AbstractContextManager[Any]:
        name = ".".join(filter(None, (paths[id(layer)] if layer is not None else "", path)))
        own[WITHIN] = name
        return span(name, place) if name or place else span("model")

    # it stays: what is recomputed in backward runs these functions again
    own["within"] = within
    own.update({name: function.__get__(program) for name, function in functions.items()})
    try:
        yield
    finally:
        for name in (*functions, WITHIN):
            own.pop(name, None)


@cache
def _with_ranges(forward: FunctionType, name: str) -> Mapping[str, FunctionType]:
    """The functions of a program of that name, each run of statements of one module and line in a range."""
    file, found = forward.__code__.co_filename, dict[str, Any]()
    lines = linecache.getlines(file)
    body = ast.parse("".join(lines)).body
    defined = next(one for one in body if isinstance(one, ast.ClassDef) and one.name == name)
    functions = [one for one in defined.body if isinstance(one, ast.FunctionDef) and not one.decorator_list]
    for one in functions:
        layers = {
            arg.arg for arg in one.args.args if isinstance(arg.annotation, ast.Name) and arg.annotation.id == LAYER
        }
        one.body = _in_ranges(one, lines, layers)
    tree = ast.fix_missing_locations(ast.Module([*functions], []))
    exec(compile(tree, file, "exec"), forward.__globals__, found)
    return found


LAYER = "Container"
"""How parameters are annotated that hold the weights of a layer."""


def _in_ranges(around: ast.FunctionDef | ast.For, lines: list[str], layers: set[str]) -> list[ast.stmt]:
    """What stands in a function or a loop: statements of one module and line together in a range each."""
    found: list[ast.stmt] = []
    before: tuple[str, tuple[str, str]] | None = None
    brought: dict[str, tuple[str, str]] = {}
    place, module, end = "", ("", ""), around.lineno
    for one in around.body:
        above = [said for text in lines[end : one.lineno - 1] if (said := _said(text)) is not None]
        if above:
            place, module = above[-1], ("", "")
        end = one.end_lineno or one.lineno
        if isinstance(one, ast.For):
            inner = layers | {node.id for node in ast.walk(one.target) if isinstance(node, ast.Name)}
            one.body = _in_ranges(one, lines, inner if _module_of(one.iter, layers, {}) else layers)
            found.append(one)
            before = None
            continue
        module, at = _module_of(one, layers, brought) or module, place
        if (name := _brings(one)) is not None:
            # of the line to come
            brought[name], at = module, ""
        if before == (at, module) and isinstance(found[-1], ast.With):
            found[-1].body.append(one)
        else:
            found.append(_range(one, at, module))
        before = at, module
    return found


def _range(one: ast.stmt, place: str, module: tuple[str, str]) -> ast.With:
    layer, path = module
    arguments = f"{path!r}, {place!r}{f', {layer}' if layer else ''}"
    (made,) = ast.parse(f"with self.within({arguments}):\n    pass").body
    assert isinstance(made, ast.With)
    for node in ast.walk(made):
        # errors name the line of the program
        if isinstance(node, ast.expr | ast.stmt):
            ast.copy_location(node, one)
    made.body = [one]
    return made


def _brings(one: ast.stmt) -> str | None:
    """What a weight is called that a statement brings to where it is used; None if it does something else."""
    if not (isinstance(one, ast.Assign) and isinstance(one.value, ast.Call) and isinstance(one.targets[0], ast.Name)):
        return None
    root, path = _path_of(one.value.func)
    return one.targets[0].id if root == "self" and path in (["comm", "use"], ["comm", "use_parts"]) else None


def _module_of(one: ast.AST, layers: set[str], brought: Mapping[str, tuple[str, str]]) -> tuple[str, str] | None:
    """The module whose weights are read first: the layer that it is in, if any, and its path there.

    Args:
        brought: of weights by another name.
    """
    visitor = _Weights({**brought, **{name: (name, "") for name in layers}})
    visitor.visit(one)
    return visitor.found


class _Weights(ast.NodeVisitor):
    def __init__(self, known: Mapping[str, tuple[str, str]]) -> None:
        self._known = known
        self.found: tuple[str, str] | None = None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._look(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._look(node)

    def visit_Name(self, node: ast.Name) -> None:
        # all of a layer is handed on, or a weight is read that was brought here
        self.found = self.found or self._known.get(node.id)

    def _look(self, node: ast.Attribute | ast.Subscript) -> None:
        root, path = _path_of(node)
        if root == "self" and path[:1] == ["model"]:
            root, path = "", path[1:]
        elif self._known.get(root) != (root, ""):
            self.generic_visit(node)
            return
        self.found = self.found or (root, ".".join(path[:-1]))


def _path_of(node: ast.expr) -> tuple[str, list[str]]:
    """The name that a chain of attributes and numbers begins with, and the rest of it; "" if it is none."""
    path: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            path.insert(0, str(node.slice.value))
        else:
            return (node.id if isinstance(node, ast.Name) else ""), path
        node = node.value

"""Which modules of weft/ a user can reach: the graph of imports, read from the sources.

In: texts by path. Out: for each module the modules that it names, and those that no door leads to. A module names
another one by an import, or in a string (`"weft.commands.show"`, `"weft.train.command:work"`, a line of generated text
that imports it): commands and processes are found by their names. Docstrings name nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set

from tests.house.parsed import parsed

Graph = Mapping[str, Set[str]]
"""By the name of a module: the modules of weft/ that it names."""

_DOTTED = re.compile(r"\bweft(?:\.\w+)*")
_GENERATED = re.compile(r"\bfrom (weft(?:\.\w+)*) import (\w+(?:, \w+)*)")


def module_of(path: str) -> str:
    """`weft/ir/graph.py` is `weft.ir.graph`; `weft/ir/__init__.py` is `weft.ir`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def graph(sources: Mapping[str, str]) -> Graph:
    modules = {module_of(path) for path in sources}
    return {
        module_of(path): {found for name in _names(parsed(text)) for found in _modules(name, modules)}
        for path, text in sources.items()
    }


def unreached(imports: Graph, doors: Set[str]) -> list[str]:
    """Modules that no chain of imports from a door leads to."""
    reached: set[str] = set()
    waiting = list(doors)
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += imports[module]
    return sorted(set(imports) - reached)


def _modules(name: str, modules: Set[str]) -> Iterator[str]:
    """The modules that are loaded for a dotted name, whose last part may be a function."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return (prefix for prefix in prefixes if prefix in modules)


def _names(tree: ast.Module) -> Iterator[str]:
    """Dotted names that begin with weft, of imports and of strings in code."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Constant(value=str(text)) if id(node) not in alone:
                yield from _DOTTED.findall(text)
                for module, names in _GENERATED.findall(text):
                    yield from (f"{module}.{name}" for name in names.split(", "))

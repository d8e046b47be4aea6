"""Selecting ops and parameters by module path.

    selection := term (("|" | "-" | "&") term)*                     left to right; spaces around operators
    term      := pattern ["op=" kind ("," kind)*] | "(" selection ")"
    pattern   := component ("." component)* ["@" call] ["/" operator]
    component := "**" (any number of components) | glob

In: a Graph and a pattern. Out: a `Selection`, an immutable set of its ops in execution order, whose `text` reads
back (`parse`) as the same ops. `layers.*.attn` is the ops that module ran itself, `layers.*.attn.**` also those
inside it, `layers.*.drop@1` the second call of those modules, `layers.0.attn/view_2` one op by its name.
"""

from __future__ import annotations

import difflib
import fnmatch
import glob
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from weft.errors import PlanError
from weft.ir.graph import Graph, Op, Parameter

OPERATORS = ("|", "-", "&")


@dataclass(frozen=True)
class Selection:
    """An immutable set of ops, in execution order. Two selections are equal if they hold the same ops."""

    graph: Graph = field(compare=False, repr=False)
    names: tuple[str, ...]
    expression: str = field(default="", compare=False)
    """The text it came from; "" if it came from a predicate or a list."""

    @cached_property
    def text(self) -> str:
        """A description that `parse` reads back."""
        return self.expression or describe(self.graph, self.names)

    @cached_property
    def _set(self) -> frozenset[str]:
        return frozenset(self.names)

    def __iter__(self) -> Iterator[Op]:
        return (self.graph.by_name[name] for name in self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, op: object) -> bool:
        return (op.name if isinstance(op, Op) else op) in self._set

    def __or__(self, other: Selection) -> Selection:
        return self._combine("|", other, self._set | other._set)

    def __sub__(self, other: Selection) -> Selection:
        return self._combine("-", other, self._set - other._set)

    def __and__(self, other: Selection) -> Selection:
        return self._combine("&", other, self._set & other._set)

    def _combine(self, operator: str, other: Selection, names: frozenset[str]) -> Selection:
        expression = ""
        if self.expression and other.expression:
            left = self.expression if _tightest(self.expression) == operator == "|" else _wrap(self.expression)
            expression = f"{left} {operator} {_wrap(other.expression)}"
        return Selection(self.graph, in_order(self.graph, names), expression)

    def __str__(self) -> str:
        return self.text


def in_order(graph: Graph, names: Iterable[str]) -> tuple[str, ...]:
    """The names in execution order, each once."""
    wanted = set(names)
    return tuple(op.name for op in graph.ops if op.name in wanted)


def select(graph: Graph, names: Iterable[str]) -> Selection:
    """The ops of these names."""
    return Selection(graph, in_order(graph, names))


def match(
    graph: Graph,
    pattern: str = "**",
    *,
    op: str | Sequence[str] | None = None,
    where: Callable[[Op], bool] | None = None,
) -> Selection:
    """The ops whose module path fits a pattern.

    Args:
        graph: where to look.
        pattern: over module paths, see the head of this file.
        op: an operator's short name (`linear`), full target, or several of them.
        where: a further condition on the op.
    """
    kinds = (op,) if isinstance(op, str) else tuple(op or ())
    path, slash, operator = pattern.rpartition("/") if "/" in pattern else (pattern, "", "")
    wanted = _module_pattern(path)
    found = tuple(
        one.name
        for one in graph.ops
        if (not kinds or one.kind in kinds or one.target in kinds)
        and (not slash or fnmatch.fnmatchcase(operator_name(one), operator))
        and wanted.fits(one)
        and (where is None or where(one))
    )
    text = (shlex.quote(pattern) if " " in pattern else pattern) + (f" op={','.join(kinds)}" if kinds else "")
    return Selection(graph, found, "" if where else text)


def inside(graph: Graph, module: str) -> Selection:
    """All ops that a module and the modules in it ran."""
    return match(graph, f"{glob.escape(module)}.**" if module else "**")


def operator_name(op: Op) -> str:
    """The last part of an op's name: `view_2` of `h.0.attn/view_2`."""
    return op.name.rpartition("/")[2]


def _components(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


@dataclass(frozen=True)
class _ModulePattern:
    """Globs for the components of a path, and for the number of the innermost module's call."""

    components: tuple[str, ...]
    call: str

    def fits(self, op: Op) -> bool:
        return fnmatch.fnmatchcase(str(op.call), self.call) and _fits(self.components, _components(op.path))


def _module_pattern(text: str) -> _ModulePattern:
    path, _, call = text.rpartition("@") if "@" in text else (text, "", "*")
    if "@" in path or "." in call:
        raise PlanError(
            f"{text!r} asks for a call of an outer module",
            remedy="calls are counted for the innermost module: write @call behind the last component",
        )
    return _ModulePattern(_components(path), call)


def _fits(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_fits(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _fits(pattern[1:], path[1:])


def parse(graph: Graph, text: str) -> Selection:
    """Read a selection back from its text.

    Raises:
        PlanError: if the text is no selection.
    """
    spaced = text.replace("(", " ( ").replace(")", " ) ")
    try:
        tokens = shlex.split(spaced)
    except ValueError as error:
        raise _malformed(text, str(error)) from None
    found, rest = _expression(graph, tokens, text)
    if rest:
        raise _malformed(text, f"{rest[0]!r} was not expected")
    return found


def _expression(graph: Graph, tokens: list[str], text: str) -> tuple[Selection, list[str]]:
    left, rest = _term(graph, tokens, text)
    while rest and rest[0] in OPERATORS:
        operator = rest[0]
        right, rest = _term(graph, rest[1:], text)
        left = {"|": left.__or__, "-": left.__sub__, "&": left.__and__}[operator](right)
    return left, rest


def _term(graph: Graph, tokens: list[str], text: str) -> tuple[Selection, list[str]]:
    if not tokens or tokens[0] in (*OPERATORS, ")"):
        raise _malformed(text, "a pattern is missing")
    if tokens[0] == "(":
        inside, rest = _expression(graph, tokens[1:], text)
        if not rest or rest[0] != ")":
            raise _malformed(text, "')' is missing")
        return inside, rest[1:]
    if len(tokens) > 1 and tokens[1].startswith("op="):
        return match(graph, tokens[0], op=tuple(tokens[1].removeprefix("op=").split(","))), tokens[2:]
    return match(graph, tokens[0]), tokens[1:]


def _malformed(text: str, fact: str) -> PlanError:
    return PlanError(
        f"{text!r} is no selection of ops: {fact}", remedy="write patterns like 'layers.*.attn.** op=linear | head'"
    )


def _tightest(expression: str) -> str:
    """The operator of an expression that has one sort of operator only and no parentheses; "" if it has none."""
    found = {token for token in expression.split() if token in OPERATORS}
    return "mixed" if len(found) > 1 or "(" in expression else "".join(found)


def _wrap(expression: str) -> str:
    return f"({expression})" if _tightest(expression) else expression


def is_path(text: str) -> bool:
    """True if a selection's text is a plain pattern of module paths."""
    return not any(token in text for token in (" ", "/", "("))


def module_of(pattern: str, op: Op) -> str:
    """The outermost module around an op that fits a pattern; its own if none does."""
    wanted, path = _components(pattern), _components(op.path)
    fits = (path[:i] for i in range(len(path) + 1) if _fits(wanted, path[:i]))
    return ".".join(next(fits, path))


# --- from ops to text -------------------------------------------------------------------------------------------


def fold(name: str) -> str:
    """A name with the numbers in its path replaced by wildcards.

    >>> fold("h.3.attn@1/view_2")
    'h.*.attn@1/view_2'
    """
    path, slash, operator = name.rpartition("/")
    path, at, call = path.partition("@")
    components = ("*" if component.isdigit() else component for component in path.split("."))
    return ".".join(components) + at + call + slash + operator


def address(op: Op) -> str:
    """The pattern that fits this op and no other."""
    operator = glob.escape(operator_name(op))
    return f"{glob.escape(op.path)}@{op.call}/{operator}" if op.path else f"/{operator}"


def describe(graph: Graph, names: Iterable[str]) -> str:
    """Terms that select exactly these ops, repeated layers folded by wildcard where all of them are meant."""
    wanted = set(names)
    layers: dict[str, list[Op]] = {}
    alike: dict[str, list[Op]] = {}
    for op in graph.ops:
        layers.setdefault(fold(address(op)), []).append(op)
        alike.setdefault(operator_name(op), []).append(op)
    terms: list[str] = []
    for folded, ops in layers.items():
        chosen = [op for op in ops if op.name in wanted]
        if not chosen:
            continue
        rivals = alike[operator_name(ops[0])]
        term = _exact(folded, {op.name for op in ops}, rivals) if len(chosen) == len(ops) else None
        terms += [term] if term else [_exact(address(op), {op.name}, rivals) or address(op) for op in chosen]
    return " | ".join(shlex.quote(term) if " " in term else term for term in terms)


def _exact(term: str, wanted: set[str], rivals: Iterable[Op]) -> str | None:
    """The term, without `@0` if it can be spared; None if it selects other ops too (`*` fits more than numbers)."""
    for candidate in dict.fromkeys((term.replace("@0/", "/"), term)):
        pattern = _module_pattern(candidate.rpartition("/")[0])
        if {op.name for op in rivals if pattern.fits(op)} == wanted:
            return candidate
    return None


# --- nothing matched --------------------------------------------------------------------------------------------


def near_matches(graph: Graph, text: str) -> tuple[str, ...]:
    """Paths and operators of the graph that look like the text, best first."""
    paths = {fold(f"{op.address}/x")[:-2] for op in graph.ops} | {op.path for op in graph.ops}
    kinds = {op.kind for op in graph.ops}
    pattern, _, kind = text.partition(" op=")
    near = difflib.get_close_matches(pattern.removesuffix(".**"), sorted(paths - {""}), n=3, cutoff=0.4)
    near += [f"op={one}" for one in difflib.get_close_matches(kind or pattern, sorted(kinds), n=2, cutoff=0.5)]
    return tuple(near)


def refuse_empty(selection: Selection) -> Selection:
    """The selection, unless it is empty."""
    if selection.names:
        return selection
    near = near_matches(selection.graph, selection.expression) if selection.expression else ()
    raise PlanError(
        f"{selection.expression or 'the selection'} matches no op of {selection.graph.name}",
        remedy=f"did you mean {' or '.join(near)}?" if near else "patterns name module paths: 'layers.*.attn.**'",
    )


# --- parameters -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterSelection:
    """Parameters, by the names of their tensors. Equal if they hold the same ones."""

    tensors: tuple[str, ...]
    text: str = field(default="", compare=False)


ParametersLike = str | Parameter | Iterable[str | Parameter]


def match_parameters(graph: Graph, parameters: ParametersLike) -> ParameterSelection:
    """Parameters by dotted-name pattern (`layers.*.mlp.**`), or given one by one. A tied one is found by any name.

    Raises:
        PlanError: if a pattern fits none; near matches are listed.
    """
    items = (parameters,) if isinstance(parameters, str | Parameter) else tuple(parameters)
    terms = [term for item in items for term in (_parameter_terms(item))]
    found: set[str] = set()
    for term in terms:
        pattern = _components(term)
        hits = {p.tensor for p in graph.parameters if any(_fits(pattern, _components(n)) for n in p.names)}
        if not hits:
            names = sorted({name for parameter in graph.parameters for name in parameter.names})
            near = difflib.get_close_matches(term, names, n=3, cutoff=0.4)
            raise PlanError(
                f"{term!r} matches no parameter of {graph.name}",
                remedy=f"did you mean {' or '.join(near)}?" if near else "patterns name parameters: 'layers.*.weight'",
            )
        found |= hits
    if not terms:
        raise PlanError("no parameters were given", remedy="give a pattern such as 'layers.**'")
    tensors = tuple(p.tensor for p in graph.parameters if p.tensor in found)
    return ParameterSelection(tensors, " | ".join(terms))


def parameters_of(graph: Graph, pattern: str) -> list[Parameter]:
    """Parameters by a pattern of their names, or of modules that hold them (`layers.*`, everything inside included)."""
    inside = [f"{term.strip().removesuffix('.**')}.**" if term.strip() != "**" else term for term in pattern.split("|")]
    try:
        found = match_parameters(graph, " | ".join(inside))
    except PlanError:
        # the error is to show the pattern as it was written
        found = match_parameters(graph, pattern)
    return [graph.parameter_tensors[tensor] for tensor in found.tensors]


def _parameter_terms(item: str | Parameter) -> list[str]:
    if isinstance(item, Parameter):
        return [glob.escape(item.names[0])]
    return [term.strip() for term in item.split("|")]

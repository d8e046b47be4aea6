"""Rules of registered algorithms: what a plan has chosen for an op, or the user's default.

In: an op, its graph, the name of an algorithm. Out: its Rule. A user's algorithm is fitted to the op's shapes and tried
at its first use, as a stated rule is: every name cut in two and three parts, even and uneven, in pairs, forward and
backward, against the operator run whole. One that gives other numbers, or other collectives than it says, is refused
with what was found.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from weft.errors import RuleError, did_you_mean
from weft.ir.graph import Graph, Op
from weft.ops.arguments import family
from weft.ops.rule import Rule
from weft.ops.stated import checked_rule, stated
from weft.ops.table import rule_for
from weft.runtime.operators.algorithms import OWN, REGISTRY, Algorithm
from weft.runtime.operators.custom import CustomOp, Stated


def registered_rule(op: Op, graph: Graph, name: str = "") -> Rule:
    """The rule of an op as an algorithm cuts it."""
    found = REGISTRY.find(family(op), name)
    if found is None and name not in ("", OWN):
        raise unknown(name, family(op), op.place)
    if found is None:
        return rule_for(op, graph)
    rule = checked_rule(op, graph, found.stated)
    _refuse_other_talk(found, rule, op)
    if found.cost is None:
        return rule
    moved = int(found.cost(rule.sizes))
    return replace(rule, algorithms={name: replace(one, bytes=moved) for name, one in rule.algorithms.items()})


def told_by_user(graph: Graph) -> Iterator[str]:
    """All that users have said of the operators of a graph: what else than weft itself its rules come from."""
    seen: set[str] = set()
    for op in graph.ops:
        if op.target in seen:
            continue
        seen.add(op.target)
        said = stated(op)
        if said is not None:
            yield f"{op.target} {_content(said, getattr(op.function, 'cls', op.function))}"
        for name in REGISTRY.names(family(op)):
            found = REGISTRY.find(family(op), name)
            if found is not None:
                yield f"{op.target} {name} {found.default} {found.exchanges} {_content(found.stated, found.stated.run)}"


def _content(said: Stated, function: Any) -> str:
    """A statement and the source of the function that it is about: a rule was tried with this one."""
    function = function.function if isinstance(function, CustomOp) else function
    try:
        source = "" if function is None else inspect.getsource(function)
    except (OSError, TypeError):
        source = repr(function)
    return f"{said.rule} {said.comm} {said.indices} {said.sizes} {source}"


def unknown(name: str, operator: str = "", place: str = "") -> RuleError:
    """The error of one who asks for an algorithm that is not there."""
    known = (OWN, *REGISTRY.names(operator))
    listed = f"known: {', '.join(known)}; weft.register_algorithm adds one"
    return RuleError(
        f"no algorithm{f' of {operator}' if operator else ''} is called {name!r}",
        place=place,
        remedy=did_you_mean(name, known) + listed,
    )


def _refuse_other_talk(algorithm: Algorithm, rule: Rule, op: Op) -> None:
    """What an algorithm says it exchanges must be what it was seen to exchange."""
    for name, said in (algorithm.exchanges or {}).items():
        seen = rule.algorithms.get(name)
        if seen is None or replace(said, bytes=None) != seen:
            raise RuleError(
                f"the algorithm {algorithm.name!r} of {op.kind} says that it exchanges {said} along {name!r}, "
                f"but it was seen to exchange {seen}",
                place=algorithm.place,
                remedy="say what it does, or leave exchanges out",
            )

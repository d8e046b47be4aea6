"""register_algorithm: a user's algorithm for an operator; and the registry of these, by operator and name.

In: the name of an algorithm, the operator, a rule as text, and the function that each cell runs. Out: an Algorithm in
the registry. This module does not need the compiler, for the ranks of a job import the module that registers, to call
the function.

An operator may have several algorithms. A plan names the one it wants, `weft.algorithm("ring", "s", 4)`; one that names
none gets the last that was registered as the default, else weft's own rule. One operator, one name: one algorithm; the
same name from the same line again (a file that is loaded twice) replaces the first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from weft.runtime.operators.custom import CustomOp, Stated, names_in

OWN = "default"
"""What the algorithm that a plan gets which names none can be called."""

Cost = Callable[[Mapping[str, int]], int]
"""Bytes that the collectives of one cell move in one forward and backward, from the sizes of the rule's names."""

Run = TypeVar("Run", bound=Callable[..., Any])


@dataclass(frozen=True)
class Exchange:
    """What an algorithm does along the axes that cut a name, for the check and the costs.

    Args:
        output: role of the outputs that lack the name: "copy" (complete on every cell) or "partial".
        gradient: role of the gradient of inputs that lack the name: "copy" or "partial".
        forward, backward: collectives entered by every cell, in order (`all_reduce`, `all_gather`, ...).
        bytes: that they move, all together, in one cell; None: as many as the outputs have, twice.
    """

    output: str = "copy"
    gradient: str = "partial"
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    bytes: int | None = None


@dataclass(frozen=True)
class Algorithm:
    """One way to cut an operator whose cells talk.

    Args:
        operator: the target without its overload, `aten.softmax`.
        name: by which a plan chooses it.
        stated: what it cuts, as text, and the function that each cell runs.
        exchanges: what is exchanged along each name it cuts; found by running it if not said.
        cost: None: estimated from what the op makes.
        default: what a plan gets which names none.
        place: of its registration.
    """

    operator: str
    name: str
    stated: Stated
    exchanges: Mapping[str, Exchange] | None = None
    cost: Cost | None = None
    default: bool = False
    place: str = ""


class Registry:
    """Algorithms by operator and name."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Algorithm]] = {}

    def add(self, algorithm: Algorithm) -> None:
        """Register an algorithm."""
        known = self._found.setdefault(algorithm.operator, {})
        other = known.get(algorithm.name)
        if algorithm.name == OWN or (other is not None and other.place != algorithm.place):
            raise ValueError(f"{algorithm.operator} has an algorithm {algorithm.name!r} already: give it another name")
        # the last one is found first
        known.pop(algorithm.name, None)
        known[algorithm.name] = algorithm

    def remove(self, operator: str, name: str) -> None:
        """Forget an algorithm."""
        del self._found[operator][name]

    def find(self, operator: str, name: str = "") -> Algorithm | None:
        """The algorithm of that name; if none is given the default; None for weft's own rule."""
        known = self._found.get(operator, {})
        if name not in ("", OWN):
            return known.get(name)
        return next((one for one in reversed(known.values()) if one.default), None)

    def names(self, operator: str = "") -> tuple[str, ...]:
        """The names of an operator's algorithms; of all operators if none is given."""
        if operator:
            return tuple(self._found.get(operator, {}))
        return tuple(dict.fromkeys(name for known in self._found.values() for name in known))


REGISTRY = Registry()
"""The one registry of a process: `register_algorithm` adds to it, rule books look into it."""


def register_algorithm(
    name: str,
    *,
    op: Any,
    rule: str,
    indices: str | Iterable[str] = (),
    sizes: str | Iterable[str] = (),
    exchanges: Mapping[str, Exchange] | None = None,
    cost: Cost | None = None,
    default: bool = False,
) -> Callable[[Run], Run]:
    """Say how cells that talk to each other can run an operator together; decorates the function that each cell runs.

    The function is called with the arguments of the operator, tensors being the cell's parts, wherever a name is cut
    that it cares for (marked `!` in the rule, or listed in `indices` or `sizes`); elsewhere the operator itself is. It
    must stand in a module or model file from which a generated program can import it, and use torch alone, or what
    `weft.runtime.comm` offers: `sum_over`, `sum_to_copy`, `reduce`. At its first use with an op it is tried, every name
    cut in several ways, against the operator run whole, and refused with a counter-example if the numbers differ.

    Args:
        name: by which plans choose it: `plan.trans(ops, weft.algorithm(name, "s", 4))`.
        op: the operator: `"aten.softmax"`, `torch.ops.aten.softmax`, or one of a library of your own.
        rule: a name for each dim of each operand and output. Names marked `!` are those along which the function
            talks: it is called with `comm=`, a tuple of the communicators of those that are cut.
        indices: names whose global indices the function takes as `indices=`, a list of intervals `((start, stop), ...)`
            that the part holds; for several names a tuple of such lists.
        sizes: names whose whole sizes it takes as `sizes=`, a number; for several names a tuple of numbers.
        exchanges: for each name marked `!` what is left where an operand lacks it, and the collectives, forward and
            backward. Found by running the function if it is not said; what is said is checked.
        cost: bytes that the collectives of one cell move, from the sizes of the rule's names. For planners.
        default: take it wherever the operator is cut and the plan names no algorithm.

    >>> @register_algorithm("doc", op="aten.softmax", rule="b s! -> b s!")
    ... def softmax(x, dim, dtype=None, *, comm):
    ...     ...
    >>> REGISTRY.names("aten.softmax")[-1]
    'doc'
    >>> REGISTRY.remove("aten.softmax", "doc")
    """
    frame = sys._getframe(1)
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    operator = _operator(op)
    talking = tuple(dict.fromkeys(word.strip("(),&!") for word in rule.split() if word.strip("(),&").endswith("!")))

    def register(run: Run) -> Run:
        said = Stated(rule, talking, names_in(indices), place, names_in(sizes), run)
        REGISTRY.add(Algorithm(operator, name, said, exchanges, cost, default, place))
        return run

    return register


def _operator(op: Any) -> str:
    """The operator's target without its overload."""
    if isinstance(op, CustomOp):
        raise TypeError(f"{op.__qualname__} is a function of yours: say in its own rule where it talks (register_op)")
    if isinstance(op, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return ".".join(str(op).split(".")[:2])
    words = op.replace("::", ".").split(".") if isinstance(op, str) else []
    if len(words) < 2:
        raise TypeError(f'{op!r} is no operator: write op="aten.softmax", or torch.ops.aten.softmax')
    return ".".join(words[:2])

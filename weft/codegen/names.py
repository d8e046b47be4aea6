"""Names: what values are called in the text.

In: ops with the user's lines. Out: short legal names, from the user's own assignment where the op ends one
(`q, k, v = ...`), else the module's name where it runs a single op, else the operator's. Inside a function a name
is given again once the value that had it is dead, so that the text reads like the model and memory is let go.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from weft.ir.graph import Graph, Op

_TARGETS = re.compile(r"^\s*([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*)\s*(?::[^=]+)?[-+*/@|&]?=(?!=)")
_SHORT = {
    "scaled_dot_product_attention": "attention",
    "cross_entropy_loss": "loss",
    "layer_norm": "norm",
    "native_layer_norm": "norm",
    "_to_copy": "to",
}
RESERVED = frozenset({*keyword.kwlist, *dir(builtins), "self", "torch", "F", "nn", "Tensor", "chunk", "draw", "i"})


def legal(word: str) -> str:
    """A word as an identifier.

    >>> legal("0.weight")
    '_0_weight'
    """
    found = re.sub(r"\W", "_", word).strip("_") or "x"
    return f"_{found}" if found[0].isdigit() else found


def targets_in(text: str) -> tuple[str, ...]:
    """The names that a line of Python assigns to.

    >>> targets_in("q, k, v = self.c_attn(x).split(2)")
    ('q', 'k', 'v')
    """
    match = _TARGETS.match(text)
    return tuple(word.strip() for word in match[1].split(",")) if match else ()


def base_names(graph: Graph) -> Mapping[str, str]:
    """A name for every tensor that an op makes, not yet unique."""
    counts = Counter((op.path, op.call) for op in graph.ops)
    found: dict[str, str] = {}
    for op, following in zip(graph.ops, [*graph.ops[1:], None], strict=True):
        ends = following is None or not _is_one_line(op, following)
        targets = targets_in(op.source.text) if ends else ()
        if len(targets) == len(op.outputs) and all(name != "_" for name in targets):
            found.update(zip(op.outputs, map(legal, targets), strict=True))
            continue
        own = own_name(op, alone=counts[op.path, op.call] == 1)
        for number, output in enumerate(op.outputs):
            found[output] = own if len(op.outputs) == 1 else f"{own}_{number}"
    return found


def _is_one_line(op: Op, following: Op) -> bool:
    """True if the user's line that made an op goes on with the next: in the same module, in one that it calls, or in
    another one that the same module calls. Layers of a list are not called by the list."""
    if (op.source.file, op.source.line) != (following.source.file, following.source.line):
        return False
    if op.path == following.path:
        return op.call == following.call
    (parent, _, last), (other_parent, _, other) = op.path.rpartition("."), following.path.rpartition(".")
    beside = parent == other_parent and not (last.isdigit() or other.isdigit())
    return beside or _is_inside(op.path, following.path) or _is_inside(following.path, op.path)


def _is_inside(path: str, other: str) -> bool:
    """True for a module within another; all are within the root."""
    return not other or path.startswith(f"{other}.")


def own_name(op: Op, *, alone: bool) -> str:
    """The module's name if the op is all that the module does, else the operator's."""
    last = op.path.rsplit(".", 1)[-1]
    if alone and last and not last.isdigit():
        return legal(last)
    return legal(_SHORT.get(op.kind, op.kind))


def free_name(base: str, is_free: Callable[[str], bool]) -> str:
    """The base, or the first of `base_1`, `base_2` ... that is free."""
    return next(filter(is_free, itertools.chain([base], (f"{base}_{i}" for i in itertools.count(1)))))


class Names:
    """Names in one function. `last`: the position after which each value is dead; values not in it never are."""

    def __init__(self, last: Mapping[str, int], reserved: Iterable[str]) -> None:
        self._last = last
        self._reserved = {*RESERVED, *reserved}
        self._holders: dict[str, list[str]] = {}

    def give(self, value: str, base: str, now: int) -> str:
        """A name for a value made at position `now`."""

        def is_free(name: str) -> bool:
            return name not in self._reserved and all(self.is_dead(one, now) for one in self._holders.get(name, ()))

        name = free_name(legal(base), is_free)
        self._holders[name] = [value]
        return name

    def alias(self, name: str, value: str) -> None:
        """The name also stands for this value, until that is dead."""
        self._holders.setdefault(name, []).append(value)

    def is_dead(self, value: str, now: int) -> bool:
        """True if nothing reads the value after `now`."""
        return self._last.get(value, now + 1) <= now

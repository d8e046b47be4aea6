"""All ways in which a rule is proven: even, uneven, in two and three parts, nested, in groups, empty, and in pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from weft.ir.oplayout import Cut, cut_table, plain_cut
from weft.ops.rule import Rule

SHARES = ((1, 1), (1, 2), (1, 1, 1), (1, 2, 1))
"""Two parts and three, even and uneven."""
EMPTY = ((0, 1), (0, 2, 1))
"""With a part that holds nothing."""


def cuts(rule: Rule, *, empty: bool = True, names: Sequence[str] | None = None) -> Iterator[tuple[Cut, ...]]:
    """Every name that may be cut, alone in every way, then every pair of names."""
    named = [n for n in rule.cuttable if rule.sizes[n] > 1] if names is None else list(names)
    for name in named:
        yield from _alone(name, rule.sizes[name], empty)
    for a, b in itertools.combinations(named, 2):
        yield (plain_cut(a, rule.sizes[a], (1, 1)), plain_cut(b, rule.sizes[b], _lopsided(rule.sizes[b])))


def _alone(name: str, size: int, empty: bool) -> Iterator[tuple[Cut, ...]]:
    for shares in (*SHARES, *(EMPTY if empty else ())):
        if size >= sum(1 for share in shares if share):
            made = plain_cut(name, size, shares)
            if 0 in shares or all(cut_table([made])):
                yield (made,)
    if size % 4 == 0:
        yield (Cut(name, (1, 1), (size // 2, size // 2), size // 2),)
    if size >= 4:
        yield (plain_cut(name, size, (1, 1)), plain_cut(name, size, (1, 1)))


def _lopsided(size: int) -> tuple[int, ...]:
    return (2, 1) if size > 2 else (1, 1)

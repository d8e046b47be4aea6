"""Coverage: which operators of a model may be cut, and what share of the work they carry.

In: a Graph. Out: a Coverage: one Kind for each operator and origin of its rule, the heaviest first. Promised: an
operator that has no rule, and so is copied on every device, is told with its share (`unruled_warnings`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from weft.ir.graph import Graph, Op
from weft.ops.book import RuleBook
from weft.ops.rule import Rule
from weft.ops.work import Work, work_of

NONE = "none"
"""The source of a rule that nobody gave."""
LITTLE = 1e-3
"""A share of the memory traffic that nobody needs to hear of."""
MUCH = 1e-2
"""A share of the work that is told even if the rule itself says that nothing can be cut."""


@dataclass(frozen=True)
class Kind:
    """All calls of one operator whose rules come from the same place.

    Args:
        rules: as text, the most frequent first.
        names: that may be cut, under the first rule.
        flops_share, bytes_share: of the whole model, from 0 to 1.
        first: the name of the first of the ops.
        line: of the user's, where it stands.
    """

    operator: str
    source: str
    count: int
    rules: tuple[str, ...]
    names: tuple[str, ...]
    work: Work
    flops_share: float
    bytes_share: float
    first: str
    line: str
    constant: bool
    reason: str = ""
    """Why nothing of it may be cut, where that was found out."""

    @property
    def means(self) -> str:
        """In words."""
        if self.source == NONE:
            copied = f"no rule: runs copied on every device: {show_share(self.share)} of the work"
            return f"{copied} ({self.reason})" if self.reason else copied
        if self.source == "view":
            return "computes nothing; follows its neighbours"
        if not self.names:
            return "the same on every device: nothing in it to cut"
        if self.source == "discovered":
            return f"may be cut along {', '.join(self.names)} (found by running it)"
        talk = " (the parts talk along names with !)" if any("!" in rule for rule in self.rules[:1]) else ""
        return f"may be cut along {', '.join(self.names)}{talk}"

    @property
    def share(self) -> float:
        """Of the work: floating-point operations, or memory traffic, whichever is more."""
        return max(self.flops_share, self.bytes_share)

    def as_json(self) -> dict[str, Any]:
        return {
            "operator": self.operator,
            "source": self.source,
            "count": self.count,
            "rule": None if self.source == NONE else self.rules[0],
            "rules": [] if self.source == NONE else list(self.rules),
            "names": list(self.names),
            "flops": self.work.flops,
            "bytes": self.work.bytes,
            "flops_share": self.flops_share,
            "bytes_share": self.bytes_share,
            "first": self.first,
            "line": self.line,
            "means": self.means,
        }


@dataclass(frozen=True)
class Coverage:
    """All operators of a model."""

    kinds: tuple[Kind, ...]

    @property
    def operators(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def ruled(self) -> int:
        """How many ops have a rule."""
        return sum(kind.count for kind in self.kinds if kind.source != NONE)

    @property
    def flops_share(self) -> float:
        """Of the floating-point work, what has a rule."""
        return 1.0 - sum(kind.flops_share for kind in self.kinds if kind.source == NONE)

    @property
    def bytes_share(self) -> float:
        return 1.0 - sum(kind.bytes_share for kind in self.kinds if kind.source == NONE)

    def __str__(self) -> str:
        return (
            f"{self.ruled} of {self.operators} operators have a rule: {show_share(self.flops_share)} of the "
            f"floating-point work, {show_share(self.bytes_share)} of the memory traffic"
        )


def coverage(graph: Graph, book: RuleBook | None = None) -> Coverage:
    """What a model is made of."""
    book = RuleBook(graph) if book is None else book
    groups: dict[tuple[str, str], list[Op]] = {}
    for op in graph.ops:
        groups.setdefault((op.kind, book.rule(op).source), []).append(op)
    works = {key: sum((work_of(op, book.rule(op), graph) for op in ops), Work()) for key, ops in groups.items()}
    total = sum(works.values(), Work())
    found = [_kind(ops, [book.rule(op) for op in ops], works[key], total) for key, ops in groups.items()]
    return Coverage(tuple(sorted(found, key=lambda kind: (-kind.work.flops, -kind.work.bytes, kind.source == "view"))))


def _kind(ops: list[Op], rules: list[Rule], work: Work, total: Work) -> Kind:
    texts: dict[str, int] = {}
    for rule in rules:
        texts[str(rule)] = texts.get(str(rule), 0) + 1
    often = sorted(texts, key=lambda text: -texts[text])
    first = next(rule for rule in rules if str(rule) == often[0])
    op = ops[0]
    return Kind(
        operator=op.kind,
        source=first.source,
        count=len(ops),
        rules=tuple(often),
        names=tuple(name for name in first.cuttable if first.sizes[name] > 1),
        work=work,
        flops_share=work.flops / total.flops if total.flops else 0.0,
        bytes_share=work.bytes / total.bytes if total.bytes else 0.0,
        first=op.name,
        line=op.line,
        constant=all(op.constant for op in ops),
        reason=first.reason,
    )


def unruled_warnings(kinds: Iterable[Kind]) -> list[str]:
    """One line for each operator that carries work in every step and that no plan can cut: without a rule, or whose
    rule has nothing to cut."""
    return [
        f"{kind.operator} has {'no rule' if kind.source == NONE else 'nothing to cut'}: {_times(kind.count)} copied on "
        f"every device: {show_share(kind.share)} of the work ({'; '.join(filter(None, (kind.first, kind.line)))})"
        for kind in kinds
        if not kind.constant and _is_copied(kind)
    ]


def _is_copied(kind: Kind) -> bool:
    if kind.source == NONE:
        return bool(kind.work.flops) or kind.share >= LITTLE
    # an operator on single numbers is no work
    return not kind.names and kind.flops_share >= MUCH and kind.work.flops > kind.count


def _times(count: int) -> str:
    return "it runs" if count == 1 else f"all {count} of them run"


def show_share(share: float) -> str:
    """A part of 1 in percent; what is little is not nothing, and nearly all is not all.

    >>> show_share(0.5), show_share(0.0004), show_share(0.0), show_share(0.9999), show_share(1.0)
    ('50%', '<0.1%', '0%', '>99.9%', '100%')
    """
    percent = 100 * share
    if 0 < percent < 0.1:
        return "<0.1%"
    if 99.9 < percent < 100 - 1e-9:
        return ">99.9%"
    exact = percent < 10 or 99 < percent < 100
    return f"{percent:.1f}".removesuffix(".0") + "%" if exact else f"{percent:.0f}%"

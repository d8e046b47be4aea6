"""The collectives of a Program, counted by phase and kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weft.ir.program import Compute, Move, Program, Reshard, Sync, Use, walk
from weft.ops.book import RuleBook

PHASES = ("forward", "backward", "gradients", "inside")
LOCAL = "local"


@dataclass(frozen=True)
class Collectives:
    """Kinds and counts, phase by phase; phases without any are absent."""

    counts: dict[str, dict[str, int]]

    def __str__(self) -> str:
        lines = []
        for phase, kinds in self.counts.items():
            lines.append(f"{phase:<9}  " + ", ".join(f"{kind} x{n}" for kind, n in sorted(kinds.items())))
        return "\n".join(lines) or "none"


def collectives(program: Program, book: RuleBook | None = None) -> Collectives:
    """The collectives of one step: between ops, forward and backward, of gradients, and inside operators that
    communicate. Local moves are not counted; one inside a recomputed region is counted once, where it stands."""
    rules = book or RuleBook(program.graph)
    found: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
    for step in walk(program.steps):
        match step:
            case Use(_, moves):
                found["forward"].update(_kinds(moves))
            case Reshard(_, _, forward, backward):
                found["forward"].update(_kinds(forward))
                found["backward"].update(_kinds(backward or ()))
            case Sync(_, _, paths):
                found["gradients"].update(kind for path in paths for kind in _kinds(path))
            case Compute(op, layout, _, _):
                exchanges = rules.rule(program.graph.by_name[op], layout.algorithm).algorithms
                for name in layout.cut_names:
                    if name in exchanges:
                        found["inside"].update((*exchanges[name].forward, *exchanges[name].backward))
            case _:
                pass
    return Collectives({phase: dict(kinds) for phase, kinds in found.items() if kinds})


def _kinds(moves: Iterable[Move]) -> Iterator[str]:
    return (move.kind for move in moves if move.kind != LOCAL)

"""Unique names: the first taker gets the plain one, later ones `_1`, `_2` ..."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Names:
    """The names taken so far."""

    taken: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)

    def take(self, wanted: str) -> str:
        name = wanted
        while name in self.taken:
            self.counts[wanted] = self.counts.get(wanted, 0) + 1
            name = f"{wanted}_{self.counts[wanted]}"
        self.taken.add(name)
        return name

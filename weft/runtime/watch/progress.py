"""Progress: whether ranks have made the same updates.

In: of every training forward that a rank begins, how many updates it has made before. Out: the first forward before
which another rank has made another number. A rank whose script leaves out a backward or `optimizer.step()`, because it
caught an error there, would go on with other weights than the rest: where no collective is missed, nothing else tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

Began = Callable[[tuple[int, int]], None]
"""Is told the number of a forward and that of the updates before it."""
RECENT = 32
"""Forwards that are told."""
EVERY = 16
"""Of these further back, every so many-th: ranks need not be at the same one."""


class Progress:
    """What a rank has done, module by module in the order in which they are made, which is the same on all ranks."""

    def __init__(self) -> None:
        self._made: list[tuple[int, deque[tuple[int, int]]]] = []

    def of_module(self, reference: int) -> Began:
        """A further module; the reference is the rank that others are compared with."""
        made = deque[tuple[int, int]](maxlen=RECENT * EVERY)
        self._made.append((reference, made))
        return made.append

    def told(self) -> list[list[tuple[int, int]]]:
        """By module: numbers of forwards, each with the updates before it."""
        # copied as a whole: the rank goes on meanwhile
        copied = [list(made) for _, made in self._made]
        return [[*made[-RECENT:], *(one for one in made[:-RECENT] if one[0] % EVERY == 0)] for made in copied]

    def references(self) -> set[int]:
        """The ranks that this one is compared with."""
        return {reference for reference, made in self._made if made}

    def difference(self, rank: int, theirs: Sequence[Sequence[Sequence[int]]]) -> tuple[int, int, int] | None:
        """A forward, and the updates before it here and on that rank, if they are not as many.

        >>> here = Progress()
        >>> began = here.of_module(0)
        >>> began((0, 0)), began((1, 0)), here.difference(0, [[(0, 0), (1, 1)]])
        (None, None, (1, 0, 1))
        """
        for (reference, _), mine, other in zip(self._made, self.told(), theirs, strict=False):
            known = {one[0]: one[1] for one in other}
            for number, updates in mine if reference == rank else ():
                if known.get(number, updates) != updates:
                    return number, updates, known[number]
        return None

"""Memory of a simulated step: a curve, its peak, and what is held then.

In: when a rank's Holds were played. Out: Memory. A Hold that lets go has the kind and the line of the one that took, so
what is held of a kind and a line is the sum of their Holds. The state is held all the time. Holds take effect at the
point of the compute stream where they are issued, as blocks of torch's caching allocator do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from weft.simulate.history import Lane


@dataclass(frozen=True)
class Memory:
    """What a rank holds in a step.

    Args:
        curve: seconds, and bytes held from then on. peak: the most bytes. when: they are held first.
        kinds: bytes at the peak by kind, the largest first; those of the state too.
        causes: bytes at the peak by kind and line of the user's source, the largest first; the state's have no line.
    """

    curve: tuple[tuple[float, int], ...]
    peak: int
    when: float
    kinds: dict[str, int]
    causes: tuple[tuple[str, str, int], ...]


def memory_of(lane: Lane) -> Memory:
    """The curve and the peak of one rank."""
    state = lane.trace.state
    held = list(accumulate((one.bytes for one in lane.holds), initial=sum(state.values())))
    times = (0.0, *lane.times)
    top = max(range(len(held)), key=held.__getitem__)
    kinds: Counter[str] = Counter(state)
    causes: Counter[tuple[str, str]] = Counter({(kind, ""): size for kind, size in state.items()})
    for one in lane.holds[:top]:
        kinds[one.kind] += one.bytes
        causes[one.kind, one.place.line or one.place.what] += one.bytes
    return Memory(
        tuple(zip(times, held, strict=True)),
        held[top],
        times[top],
        {kind: size for kind, size in kinds.most_common() if size},
        tuple((kind, line, size) for (kind, line), size in causes.most_common() if size > 0),
    )

"""Regions: neighbouring steps whose ops are recomputed together become one Recompute.

In: a flat list of steps. Out: the list with every maximal run of Computes (and Chunks) that bear the same mark gathered
into a Recompute, together with the Reshards between them. A Use stays outside: the leaf of a parameter must be
one and the same in both runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.ir.program import Chunks, Compute, Recompute, Step, Use


def gather_regions(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps with recomputed runs gathered."""
    out: list[Step] = []
    body: list[Step] = []
    waiting: list[Step] = []
    mark: int | None = None
    for step in steps:
        own = _mark(step)
        if isinstance(step, Use):
            out.append(step)
        elif isinstance(step, Compute | Chunks):
            if own is None or own != mark:
                _flush(out, body, waiting)
                mark = own
            else:
                body.extend(waiting)
                waiting.clear()
            (out if own is None else body).append(step)
        else:
            (out if mark is None else waiting).append(step)
    _flush(out, body, waiting)
    return tuple(out)


def _flush(out: list[Step], body: list[Step], waiting: list[Step]) -> None:
    """Close the region: what waits for another member of it comes after."""
    if body:
        out.append(Recompute(tuple(body)))
    out.extend(waiting)
    body.clear()
    waiting.clear()


def _mark(step: Step) -> int | None:
    """The recompute mark of a step; chunks that recompute themselves bear none."""
    return step.layout.recompute if isinstance(step, Compute) else None

"""Pipelines of the usual shapes, for schedules that are asked for by numbers alone.

In: numbers of stages, rounds, passes, micro-batches. Out: Pipelines whose segments are called s0, s1, ... along the
data. Promised: nothing is special about them; every schedule takes any Pipeline of the same shape.

    chain     s0 on device 0, s1 on device 1, ...; with `virtual` rounds s4 on device 0 again
    vee       down the devices and up again: the last stage lives with the first
    interlaced   a chain between two blocks that live on all devices (a vocabulary-cut embedding and head)
    recycled  a chain run several times, only the last time with gradient
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import PlanError
from weft.ir.schedule import Pipeline, Segment


def chain(stages: int, microbatches: int, *, virtual: int = 1, splits: bool = False) -> Pipeline:
    """`stages` devices in a row, passed `virtual` times."""
    _positive(stages, "stages")
    _positive(virtual, "virtual stages")
    return _line([(number % stages,) for number in range(stages * virtual)], microbatches, splits=splits)


def vee(stages: int, microbatches: int) -> Pipeline:
    """`stages` devices passed down and up; weight gradients may be put off."""
    _positive(stages, "stages")
    return _line([(one,) for one in (*range(stages), *reversed(range(stages)))], microbatches, splits=True)


def interlaced_chain(stages: int, microbatches: int) -> Pipeline:
    """A chain between `embed` and `head`, which live on all devices."""
    _positive(stages, "stages")
    everywhere = tuple(range(stages))
    line = _line([everywhere, *((one,) for one in everywhere), everywhere], microbatches, splits=False)
    names = {
        segment.name: f"s{number - 1}" if 0 < number <= stages else "head" if number else "embed"
        for number, segment in enumerate(line.segments)
    }
    segments = tuple(
        Segment(names[one.name], one.devices, tuple(names[read] for read in one.reads)) for one in line.segments
    )
    return Pipeline(segments, microbatches)


def recycled(stages: int, microbatches: int, *, passes: int = 3) -> Pipeline:
    """A chain run `passes` times; the first stage of a pass reads the last stage of the pass before."""
    _positive(stages, "stages")
    _positive(passes, "passes")
    devices = [(number % stages,) for number in range(stages * passes)]
    return _line(devices, microbatches, splits=False, frozen=stages * (passes - 1))


def _line(devices: Sequence[tuple[int, ...]], microbatches: int, *, splits: bool, frozen: int = 0) -> Pipeline:
    segments = tuple(
        Segment(f"s{number}", group, (f"s{number - 1}",) if number else (), number >= frozen, splits)
        for number, group in enumerate(devices)
    )
    return Pipeline(segments, microbatches)


def _positive(number: int, what: str) -> None:
    if number < 1:
        raise PlanError(f"{number} {what} are none", remedy=f"a pipeline has at least one of its {what}")

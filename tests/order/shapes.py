"""Pipelines of the usual shapes, and schedules of them as relations, as the papers write them.

chain     s0 on device 0, s1 on device 1, ...; with `virtual` rounds s4 on device 0 again
vee       down the devices and up again: the last stage lives with the first
interlaced   a chain between two blocks that live on all devices (a vocabulary-cut embedding and head)
recycled  a chain run several times, only the last time with gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from weft.ir.schedule import Before, Event, Micro, Pipeline, Segment
from weft.order.steps import passes


def chain(stages: int, microbatches: int, *, virtual: int = 1, splits: bool = False) -> Pipeline:
    """`stages` devices in a row, passed `virtual` times."""
    return _line([(number % stages,) for number in range(stages * virtual)], microbatches, splits=splits)


def vee(stages: int, microbatches: int) -> Pipeline:
    """`stages` devices passed down and up; weight gradients may be put off."""
    return _line([(one,) for one in (*range(stages), *reversed(range(stages)))], microbatches, splits=True)


def interlaced_chain(stages: int, microbatches: int) -> Pipeline:
    """A chain between `embed` and `head`, which live on all devices."""
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


def recycled(stages: int, microbatches: int, *, times: int = 3) -> Pipeline:
    """A chain run `times` times; the first stage of a pass reads the last stage of the pass before."""
    devices = [(number % stages,) for number in range(stages * times)]
    return _line(devices, microbatches, splits=False, frozen=stages * (times - 1))


def _line(devices: Sequence[tuple[int, ...]], microbatches: int, *, splits: bool, frozen: int = 0) -> Pipeline:
    segments = tuple(
        Segment(f"s{number}", group, (f"s{number - 1}",) if number else (), number >= frozen, splits)
        for number, group in enumerate(devices)
    )
    return Pipeline(segments, microbatches)


def one_f_one_b_relations(pipeline: Pipeline) -> tuple[Before, ...]:
    """1F1B as relations: in order, `ahead` forwards before the first backward, then one of each in turn."""
    ahead = _hops(pipeline)
    m, found = Micro(), list[Before]()
    for segment in pipeline.segments:
        name = segment.name
        found.append(Before(Event("f", name, m), Event("f", name, m + 1)))
        if name in ahead:
            found += [
                Before(Event("b", name, m), Event("b", name, m + 1)),
                Before(Event("f", name, m + ahead[name]), Event("b", name, m)),
                Before(Event("b", name, m), Event("f", name, m + ahead[name] + 1)),
            ]
    return tuple(found)


def nf1b_relations(pipeline: Pipeline, *, distance: int = 1) -> tuple[Before, ...]:
    """nF1B as relations, per stage: f1(m + 2k) before f2(m + k) before f3(m) before b(m - hops), k the distance."""
    rounds, ahead = passes(pipeline), _hops(pipeline)
    m, found = Micro(), list[Before]()
    for device in pipeline.devices:
        stage = sorted(pipeline.on(device), key=lambda one: rounds[one.name])
        for first, second in pairwise(stage):
            gap = (rounds[second.name] - rounds[first.name]) * distance
            found.append(Before(Event("f", first.name, m + gap), Event("f", second.name, m)))
        last = stage[-1].name
        if last in ahead:
            found.append(Before(Event("f", last, m + ahead[last]), Event("b", last, m)))
    return tuple(dict.fromkeys(found))


def _hops(pipeline: Pipeline) -> dict[str, int]:
    """How many changes of devices lie between each segment that trains and the end."""
    found: dict[str, int] = {}
    for segment in reversed(pipeline.segments):
        if segment.trains:
            later = (
                found[reader] + (pipeline.by_name[reader].devices != segment.devices)
                for reader in pipeline.readers[segment.name]
                if reader in found
            )
            found[segment.name] = max(later, default=0)
    return found

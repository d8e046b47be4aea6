"""Devices that run the same segments are one device to a search.

In: a Pipeline. Out: a Fold: the same pipeline with one device for each such group, limits for it, and the way back.
Promised: a schedule of the folded pipeline is valid exactly if the unfolded one is; searches then do not grow with the
number of devices of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.ir.schedule import Pipeline, Schedule
from weft.order.live import Limits, limit_of


@dataclass(frozen=True)
class Fold:
    """A pipeline on one device of each group, and the one that stands for each device."""

    pipeline: Pipeline
    stands: Mapping[int, int]

    def limits(self, limits: Limits) -> Limits:
        """The tightest limit of each group."""
        found: dict[int, float] = {}
        for device, one in self.stands.items():
            limit = limit_of(limits, device)
            if limit is not None:
                found[one] = min(limit, found.get(one, limit))
        return found

    def unfold(self, schedule: Schedule) -> Schedule:
        """The schedule on all devices."""
        return Schedule({device: schedule.events[one] for device, one in self.stands.items()})


def fold(pipeline: Pipeline) -> Fold:
    """One device for all that hold the same segments: the first of them."""
    first: dict[tuple[str, ...], int] = {}
    stands: dict[int, int] = {}
    for device in pipeline.devices:
        held = tuple(segment.name for segment in pipeline.on(device))
        stands[device] = first.setdefault(held, device)
    kept = set(first.values())
    segments = tuple(
        replace(one, devices=tuple(device for device in one.devices if device in kept)) for one in pipeline.segments
    )
    return Fold(Pipeline(segments, pipeline.microbatches), stands)

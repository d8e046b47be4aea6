"""Schedules by the names that recipes use: `schedule=1f1b`.

In: a name, a Pipeline, settings. Out: a Schedule, proven. Promised: every name of `SCHEDULES`, which is the one place
that knows them: what makes each, which settings it takes, which stages it is made for. A pipeline that a schedule
cannot take is refused with what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.errors import PlanError
from weft.ir.schedule import Pipeline, Schedule
from weft.order.check import check_schedule
from weft.order.pattern import interlaced
from weft.order.steps import gpipe, inference, nf1b, one_f_one_b, zb_h1
from weft.order.timing import Limits, Spans
from weft.order.virtual import interleaved, zb_v

DELAYED = ("spans", "distance")
"""Settings of schedules that choose how many steps lie between passes."""


@dataclass(frozen=True)
class Named:
    """A schedule that has a name.

    Args:
        make: of a Pipeline, and of the settings that it takes.
        takes: `spans` (how long segments take), `distance` (steps between passes).
        stages: on each set of devices: a number that `virtual=` may change; or by their kind: `vee`, down the devices
            and up again; `shared`, one each, and blocks that live on all devices; `passes`, one each in every pass of
            a model that runs the same modules again.
        tried: whether a search looks at it too.
        trains: False if it has no backward.
    """

    make: Callable[..., Schedule]
    takes: tuple[str, ...] = ()
    stages: int | str = 1
    tried: bool = True
    trains: bool = True


SCHEDULES: Mapping[str, Named] = {
    "gpipe": Named(gpipe),
    "1f1b": Named(one_f_one_b, DELAYED),
    "interleaved": Named(interleaved, stages=2),
    "zb-h1": Named(zb_h1, DELAYED),
    "zb-v": Named(zb_v, stages="vee"),
    "interlaced": Named(interlaced, ("spans",), stages="shared"),
    "nf1b": Named(nf1b, DELAYED, stages="passes", tried=False),
    "inference": Named(inference, tried=False, trains=False),
}
NAMES = tuple(SCHEDULES)


def named(name: str) -> Named:
    """The schedule of a name."""
    if name not in SCHEDULES:
        raise PlanError(f"no schedule is called {name!r}", remedy=f"schedules: {', '.join(NAMES)}")
    return SCHEDULES[name]


def make_schedule(
    name: str,
    pipeline: Pipeline,
    *,
    spans: Spans | None = None,
    distance: int | None = None,
    limits: Limits = None,
) -> Schedule:
    """The schedule of a name for a pipeline, checked.

    Args:
        spans: how long each segment takes, for schedules that weigh it (interlaced, and the distance of passes).
        distance: steps between passes (1f1b, zb-h1, nf1b); the best is found if it is not given.
        limits: live micro-batches per device; more is refused.
    """
    found = named(name)
    if distance is not None and "distance" not in found.takes:
        raise PlanError(f"{name} has no distance between passes", remedy="leave distance= out, or use nf1b")
    settings = {"spans": spans, "distance": distance}
    schedule = found.make(pipeline, **{key: settings[key] for key in found.takes})
    check_schedule(pipeline if found.trains else pipeline.without_gradient(), schedule, limits=limits)
    return schedule

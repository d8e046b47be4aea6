"""Schedules by the names that recipes use: `schedule=1f1b`.

In: a name, a Pipeline, spans. Out: a Schedule, proven. Promised: every name of `SCHEDULES`, which is the one place
that knows them: what makes each, whether it weighs spans, which stages it is made for. A pipeline that a schedule
cannot take is refused with what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.errors import PlanError, did_you_mean
from weft.ir.schedule import Pipeline, Schedule
from weft.order.check import check_schedule
from weft.order.pattern import interlaced
from weft.order.steps import gpipe, inference, nf1b, one_f_one_b, zb_h1
from weft.order.timing import Spans
from weft.order.virtual import interleaved, zb_v


@dataclass(frozen=True)
class Named:
    """A schedule that has a name.

    Args:
        make: of a Pipeline, and of `spans` if it weighs them.
        weighs: whether how long segments take (`spans`) changes it.
        stages: on each set of devices: a number that `virtual=` may change; or by their kind: `vee`, down the devices
            and up again; `shared`, one each, and blocks that live on all devices; `passes`, one each in every pass of
            a model that runs the same modules again.
        tried: whether a search looks at it too.
        trains: False if it has no backward.
    """

    make: Callable[..., Schedule]
    weighs: bool = False
    stages: int | str = 1
    tried: bool = True
    trains: bool = True


SCHEDULES: Mapping[str, Named] = {
    "gpipe": Named(gpipe),
    "1f1b": Named(one_f_one_b, weighs=True),
    "interleaved": Named(interleaved, stages=2),
    "zb-h1": Named(zb_h1, weighs=True),
    "zb-v": Named(zb_v, stages="vee"),
    "interlaced": Named(interlaced, weighs=True, stages="shared"),
    "nf1b": Named(nf1b, weighs=True, stages="passes", tried=False),
    "inference": Named(inference, tried=False, trains=False),
}
NAMES = tuple(SCHEDULES)


def named(name: str) -> Named:
    """The schedule of a name."""
    if name not in SCHEDULES:
        raise PlanError(
            f"no schedule is called {name!r}", remedy=f"{did_you_mean(name, NAMES)}schedules: {', '.join(NAMES)}"
        )
    return SCHEDULES[name]


def make_schedule(
    name: str,
    pipeline: Pipeline,
    *,
    spans: Spans | None = None,
) -> Schedule:
    """The schedule of a name for a pipeline, checked.

    Args:
        spans: how long each segment takes, for schedules that weigh it (interlaced, and the distance of passes).
    """
    found = named(name)
    schedule = found.make(pipeline, spans=spans) if found.weighs else found.make(pipeline)
    check_schedule(pipeline if found.trains else pipeline.without_gradient(), schedule)
    return schedule

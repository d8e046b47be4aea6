"""Schedules by the names that recipes use: `schedule=1f1b`.

In: a name, a Pipeline, settings. Out: a Schedule, proven. Promised: every name of `NAMES`; a pipeline that a schedule
cannot take is refused with what it needs.
"""

from __future__ import annotations

from weft.errors import PlanError
from weft.ir.schedule import Pipeline, Schedule
from weft.order.check import check_schedule
from weft.order.live import Limits
from weft.order.pattern import interlaced
from weft.order.steps import gpipe, inference, nf1b, one_f_one_b, zb_h1
from weft.order.timing import Spans
from weft.order.virtual import interleaved, zb_v

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "interlaced", "nf1b", "inference")


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
    if name not in NAMES:
        raise PlanError(f"no schedule is called {name!r}", remedy=f"schedules: {', '.join(NAMES)}")
    if distance is not None and name not in ("1f1b", "zb-h1", "nf1b"):
        raise PlanError(f"{name} has no distance between passes", remedy="leave distance= out, or use nf1b")
    schedule = _make(name, pipeline, spans, distance)
    checked = pipeline.without_gradient() if name == "inference" else pipeline
    check_schedule(checked, schedule, limits=limits)
    return schedule


def _make(name: str, pipeline: Pipeline, spans: Spans | None, distance: int | None) -> Schedule:
    match name:
        case "gpipe":
            return gpipe(pipeline)
        case "interleaved":
            return interleaved(pipeline)
        case "zb-v":
            return zb_v(pipeline)
        case "interlaced":
            return interlaced(pipeline, spans=spans)
        case "inference":
            return inference(pipeline)
    make = {"1f1b": one_f_one_b, "zb-h1": zb_h1, "nf1b": nf1b}[name]
    return make(pipeline, distance=distance, spans=spans)

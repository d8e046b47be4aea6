"""Schedules by steps: GPipe, 1F1B, nF1B, ZB-H1, inference, for any pipeline.

In: a Pipeline; for some how long segments take. Out: a Schedule. Promised: valid for every pipeline and every number
of micro-batches, by construction: each event of a micro-batch gets a delay in steps, all events are sorted by
(micro-batch + delay, forward before backward before weight gradients, along the data), and each device takes its own.
Along every dependency the delay does not fall, so the sorted list keeps all data, and shared events stand in one order.

Delays make the schedules:

    GPipe      backward as late as all forwards            1F1B    backward one step later per stage away from the end
    nF1B       each further pass over the devices waits    ZB-H1   as 1F1B, weight gradients all in the step of the
               `distance` steps for the one before                 first stage's backward
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weft.errors import PlanError
from weft.ir.schedule import PHASES, Event, Pipeline, Schedule
from weft.order.timing import Spans, simulate

TRIED_DISTANCES = 16
NEAR_ENOUGH = 1.005


Delays = Mapping[str, Mapping[str, int]]
"""By phase and segment: in which step after its micro-batch's number it runs; no `w`: the backward is whole."""


def gpipe(pipeline: Pipeline) -> Schedule:
    """All forwards, then all backwards, each in the order of the micro-batches."""
    backward = {one.name: pipeline.microbatches for one in pipeline.segments if one.trains}
    return by_delays(pipeline, {"f": {one.name: 0 for one in pipeline.segments}, "b": backward})


def inference(pipeline: Pipeline) -> Schedule:
    """Forward only: a schedule of `pipeline.without_gradient()`, passes one step apart."""
    free = pipeline.without_gradient()
    return by_delays(free, {"f": passes(free)})


def one_f_one_b(pipeline: Pipeline, *, spans: Spans | None = None) -> Schedule:
    """1F1B: a stage i hops before the end runs i forwards ahead, then one forward and one backward in turn.

    Segments that come back to devices used before form further passes, as many steps apart as is best for `spans`.
    """
    return _best_distance(pipeline, spans, divided=False)


def nf1b(pipeline: Pipeline, *, spans: Spans | None = None) -> Schedule:
    """nF1B: n - 1 forward passes without gradient over the same devices, then 1F1B of the last pass.

    rewrite: step m of stage i runs  f1(m + 2k), f2(m + k), f3(m), b(m - hops to the end)  with k the distance

    The first stage of a pass reads the last stage of the pass before: at distance k a pass has k steps to come around.
    """
    if not max(passes(pipeline).values()):
        raise PlanError(
            "nf1b needs passes that come back to the devices of the pass before; this pipeline has one pass",
            remedy="use schedule=1f1b, or a model that calls the same modules again",
        )
    return _best_distance(pipeline, spans, divided=False)


def zb_h1(pipeline: Pipeline, *, spans: Spans | None = None) -> Schedule:
    """ZB-H1: 1F1B whose weight gradients fill the waiting; as many live micro-batches on each stage as on the first."""
    if not any(segment.splits for segment in pipeline.segments if segment.trains):
        raise PlanError(
            "zb-h1 puts off weight gradients, and no segment's backward can be divided",
            remedy="use schedule=1f1b, or operators whose weight gradients can be put off (linear, embedding)",
        )
    return _best_distance(pipeline, spans, divided=True)


def by_delays(pipeline: Pipeline, delays: Delays) -> Schedule:
    """The schedule that runs each event in the step of its micro-batch's number plus its delay."""
    place = {segment.name: number for number, segment in enumerate(pipeline.segments)}
    keyed: list[tuple[int, int, int, int, Event]] = []
    for phase, found in delays.items():
        for name, late in found.items():
            rank = place[name] if phase == "f" else -place[name]
            for micro in range(pipeline.microbatches):
                # Within a step a pass that is further on comes last: it may wait for the step's earlier passes.
                keyed.append((micro + late, PHASES.index(phase), rank, micro, Event(phase, name, micro)))
    keyed.sort(key=lambda entry: entry[:4])
    return project(pipeline, (entry[4] for entry in keyed))


def project(pipeline: Pipeline, events: Iterable[Event]) -> Schedule:
    """Each device's share of a list of all events: what one order of everything makes of the devices."""
    # Devices that run the same segments share one row: work does not grow with their number.
    held = {device: tuple(segment.name for segment in pipeline.on(device)) for device in pipeline.devices}
    rows: dict[tuple[str, ...], list[Event]] = {names: [] for names in held.values()}
    hosts = {
        segment.name: [row for names, row in rows.items() if segment.name in names] for segment in pipeline.segments
    }
    for event in events:
        for row in hosts[event.segment]:
            row.append(event)
    done = {names: tuple(row) for names, row in rows.items()}
    return Schedule({device: done[names] for device, names in held.items()})


def passes(pipeline: Pipeline) -> dict[str, int]:
    """How often the data has come back to devices it had left before it reaches each segment.

    A block that lives on more devices than a stage leaves none of them behind: it does not count as used.
    """
    groups = {frozenset(segment.devices) for segment in pipeline.segments}
    found: dict[str, int] = {}
    used: dict[str, frozenset[int]] = {}
    for segment in pipeline.segments:
        devices = frozenset(segment.devices)
        latest = max((found[read] for read in segment.reads), default=0)
        near = [read for read in segment.reads if found[read] == latest]
        left = [used[read] - frozenset(pipeline.by_name[read].devices) for read in near]
        returns = any(devices & one for one in left)
        found[segment.name] = latest + returns
        wide = any(group < devices for group in groups)
        before = frozenset[int]() if returns else frozenset[int]().union(*(used[read] for read in near))
        used[segment.name] = before if wide else before | devices
    return found


def _best_distance(pipeline: Pipeline, spans: Spans | None, *, divided: bool) -> Schedule:
    """The schedule at the distance between passes that has the shortest time table.

    More distance keeps more values between passes: the smallest one that is nearly as good is taken.
    """
    rounds = passes(pipeline)
    if not max(rounds.values()):
        return by_delays(pipeline, _delays(pipeline, rounds, 0, divided=divided))
    found: list[tuple[float, Schedule]] = []
    for tried in range(min(TRIED_DISTANCES, pipeline.microbatches) + 1):
        schedule = by_delays(pipeline, _delays(pipeline, rounds, tried, divided=divided))
        found.append((simulate(pipeline, schedule, spans).makespan, schedule))
        times = [time for time, _ in found]
        if tried > 1 and min(times[:-2]) <= min(times[-2:]) * NEAR_ENOUGH:
            break
    good = min(time for time, _ in found) * NEAR_ENOUGH
    return next(schedule for time, schedule in found if time <= good)


def _delays(pipeline: Pipeline, rounds: Mapping[str, int], distance: int, *, divided: bool) -> Delays:
    forward = {name: number * distance for name, number in rounds.items()}
    backward: dict[str, int] = {}
    for segment in reversed(pipeline.segments):
        if segment.trains:
            later = (
                backward[reader] + (pipeline.by_name[reader].devices != segment.devices)
                for reader in pipeline.readers[segment.name]
                if reader in backward
            )
            backward[segment.name] = max((forward[segment.name], *later))
    last = max(backward.values(), default=0)
    weight = {one.name: last for one in pipeline.segments if divided and one.trains and one.splits}
    return {"f": forward, "b": backward, "w": weight}

"""Named schedules: the published idle times, live micro-batches, and what each refuses."""

from __future__ import annotations

import pytest

from tests.order.shapes import chain, interlaced_chain, recycled, vee
from weft.errors import PlanError
from weft.ir.schedule import Event, Pipeline, Schedule, Segment
from weft.order import NAMES, Span, check_schedule, make_schedule, peaks, simulate
from weft.order.steps import one_f_one_b, passes
from weft.order.timing import bound

STAGES = (1, 2, 4, 8)
COUNTS = (1, 2, 7, 8, 32)


def every(span: Span) -> dict[str, Span]:
    return {f"s{number}": span for number in range(64)}


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("span", [Span(), Span(1, 3, 0), Span(2, 3, 1)])
def test_idle_share_of_gpipe_and_1f1b(stages: int, count: int, span: Span) -> None:
    """(p - 1) / (m + p - 1) for any times of forward and backward."""
    pipeline = chain(stages, count)
    for name in ("gpipe", "1f1b"):
        timeline = simulate(pipeline, make_schedule(name, pipeline), every(span))
        assert timeline.idle == pytest.approx((stages - 1) / (count + stages - 1), abs=1e-12)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("count", COUNTS)
def test_live_of_gpipe_and_1f1b(stages: int, count: int) -> None:
    pipeline = chain(stages, count)
    assert set(peaks(pipeline, make_schedule("gpipe", pipeline)).values()) == {count}
    live = peaks(pipeline, make_schedule("1f1b", pipeline))
    assert live == {stage: min(stages - stage, count) for stage in range(stages)}


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_idle_time_of_interleaved(stages: int, virtual: int, rounds: int) -> None:
    """(p - 1)(f + b) with f and b of one of the v segments: v times less than 1F1B of the same model."""
    pipeline = chain(stages, stages * rounds, virtual=virtual)
    timeline = simulate(pipeline, make_schedule("interleaved", pipeline))
    assert timeline.makespan - 3 * virtual * stages * rounds == 3 * (stages - 1)
    share = (stages - 1) / (virtual * stages * rounds + stages - 1)
    assert timeline.idle == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("extra", [0, 1, 5, 24])
@pytest.mark.parametrize("span", [Span(), Span(2, 2, 2), Span(3, 3, 2), Span(1, 1, 0)])
def test_idle_time_of_zb_h1(stages: int, extra: int, span: Span) -> None:
    """(p - 1)(f + b - w), with as many live micro-batches as the first stage of 1F1B."""
    count = stages + extra
    pipeline = chain(stages, count, splits=True)
    schedule = make_schedule("zb-h1", pipeline)
    timeline = simulate(pipeline, schedule, every(span))
    idle = timeline.makespan - count * (span.f + span.b + span.w)
    assert idle == (stages - 1) * (span.f + span.b - span.w)
    assert set(peaks(pipeline, schedule).values()) == {stages}


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("extra", [0, 1, 16])
def test_zb_v_leaves_no_idle_time_between(stages: int, extra: int) -> None:
    count = 2 * stages - 1 + extra
    pipeline = vee(stages, count)
    schedule = make_schedule("zb-v", pipeline)
    timeline = simulate(pipeline, schedule)
    assert timeline.makespan == 6 * count + stages - 1
    for row in schedule.events.values():
        assert timeline.ends[row[-1]] - timeline.starts[row[0]] == 6 * count
    assert set(peaks(pipeline, schedule).values()) == {2 * stages}


def shape(name: str, stages: int, count: int) -> Pipeline:
    match name:
        case "interleaved":
            return chain(stages, count, virtual=2)
        case "zb-h1":
            return chain(stages, count, splits=True)
        case "zb-v":
            return vee(stages, count)
        case "interlaced":
            return interlaced_chain(stages, count)
        case "nf1b":
            return recycled(stages, count)
    return chain(stages, count)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_every_schedule_takes_every_count(name: str, stages: int, count: int) -> None:
    pipeline = shape(name, stages, count)
    schedule = make_schedule(name, pipeline)
    # Backwards of a stage in the order of its forwards is what gradients that add up want to see.
    for row in schedule.events.values():
        for phase in "fbw":
            for segment in pipeline.segments:
                micros = [one.micro for one in row if (one.phase, one.segment) == (phase, segment.name)]
                assert micros in (list(range(count)), [])


def test_inference_only_runs_forward() -> None:
    pipeline = chain(3, 4)
    schedule = make_schedule("inference", pipeline)
    assert {event.phase for event in schedule.every()} == {"f"}
    assert simulate(pipeline.without_gradient(), schedule).makespan == 4 + 2
    with pytest.raises(PlanError, match="never runs b"):
        check_schedule(pipeline, schedule)


RECYCLED = {4: 783, 8: 804, 12: 825, 16: 852}


@pytest.mark.parametrize(("stages", "most"), RECYCLED.items())
def test_nf1b_with_wrap_around(stages: int, most: int) -> None:
    pipeline = recycled(stages, 128, times=3)
    spans = every(Span(1, 3, 0))
    assert 128 * bound(pipeline, spans) == 768
    schedule = make_schedule("nf1b", pipeline, spans=spans)
    assert simulate(pipeline, schedule, spans).makespan <= most
    assert max(peaks(pipeline, schedule).values()) <= stages


def test_passes_count_returns_to_devices() -> None:
    assert set(passes(chain(4, 1)).values()) == {0}
    assert list(passes(recycled(3, 1)).values()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    # The numbers of devices say nothing about the way the data takes.
    there = [Segment("a", (3,)), Segment("b", (1,), ("a",)), Segment("c", (2,), ("b",)), Segment("d", (3,), ("c",))]
    assert list(passes(Pipeline(tuple(there), 1)).values()) == [0, 0, 0, 1]
    # A piece that goes on where the one before it was has not come back.
    same = [Segment("a", (0,)), Segment("b", (0,), ("a",)), Segment("c", (1,), ("b",))]
    assert set(passes(Pipeline(tuple(same), 1)).values()) == {0}


def test_1f1b_of_segments_that_come_back() -> None:
    """A tied head on the first device: with passes one step apart the devices need not wait for each other."""
    segments = (Segment("embed", (0,)), Segment("body", (1,), ("embed",)), Segment("head", (0,), ("body",)))
    pipeline = Pipeline(segments, 32)
    spans = {"embed": Span(1, 1, 0), "body": Span(2, 2, 0), "head": Span(1, 1, 0)}
    found = simulate(pipeline, one_f_one_b(pipeline, spans=spans), spans).makespan
    assert found < 32 * 4 * 1.1


def test_rows_of_1f1b() -> None:
    pipeline = chain(2, 3)
    assert str(make_schedule("1f1b", pipeline)) == "0: F0 F1 B0 F2 B1 B2\n1: F0 B0 F1 B1 F2 B2"
    tied = Pipeline((Segment("a", (0,)), Segment("c", (0,), ("a",))), 1)
    assert str(make_schedule("1f1b", tied)) == "0: F0(a) F0(c) B0(c) B0(a)"


@pytest.mark.parametrize(
    ("name", "pipeline", "message"),
    [
        ("2f2b", chain(2, 2), "no schedule is called '2f2b'"),
        ("zb-h1", chain(2, 2), "no segment's backward can be divided"),
        ("zb-v", chain(2, 2, splits=True), "zb-v needs a V"),
        ("zb-v", chain(3, 2, splits=True), "zb-v needs a V"),
        (
            "zb-v",
            Pipeline((Segment("a", (0,)), Segment("b", (0,), ("a",))), 2),
            "the backward of 'a' cannot be divided",
        ),
        ("interleaved", vee(2, 4), "interleaved needs rounds"),
        ("interleaved", recycled(2, 4), "has no gradient"),
        ("nf1b", chain(4, 4), "nf1b needs passes"),
    ],
)
def test_refusals(name: str, pipeline: Pipeline, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        make_schedule(name, pipeline)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: chain(4, 0), "0 micro-batches are none"),
        (lambda: Pipeline((), 1), "without segments"),
        (lambda: Pipeline((Segment("a", ()),), 1), r"lives on devices \[\]"),
        (lambda: Pipeline((Segment("a", (0, 0)),), 1), r"lives on devices \[0, 0\]"),
        (lambda: Pipeline((Segment("a", (0,), ("b",)), Segment("b", (0,))), 1), "reads 'b', which does not stand"),
        (lambda: Pipeline((Segment("a", (0,)), Segment("a", (1,))), 1), "two segments are called 'a'"),
    ],
)
def test_bad_pipelines(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(PlanError, match=message):
        make()


def test_events_have_one_number() -> None:
    schedule = Schedule({0: (Event("f", "s0", 0),), 1: (Event("f", "s0", 0),)})
    assert schedule.every() == (Event("f", "s0", 0),)
    assert schedule.every()[0].number == 0

"""What the check refuses, and how it says so."""

from __future__ import annotations

import pytest

from tests.order.cases import changed
from tests.order.shapes import chain, interlaced_chain
from weft.errors import PlanError
from weft.ir.schedule import Event, Pipeline, Schedule, Segment
from weft.order import check_schedule, make_schedule, simulate

PIPELINE = chain(2, 3)
SCHEDULE = make_schedule("1f1b", PIPELINE)


def refused(pipeline: Pipeline, schedule: Schedule) -> str:
    with pytest.raises(PlanError) as caught:
        check_schedule(pipeline, schedule)
    assert caught.value.remedy
    return caught.value.message


def row(*texts: str, segment: str) -> list[Event]:
    return [Event(text[0].lower(), segment, int(text[1:])) for text in texts]


def test_a_forgotten_backward() -> None:
    broken = changed(SCHEDULE, 1, [one for one in SCHEDULE.events[1] if one != Event("b", "s1", 1)])
    message = refused(PIPELINE, broken)
    assert message.startswith("device 1 never runs b(s1, 1), the backward of 's1' for micro-batch 1")
    assert "device 1: f(s1, 0) b(s1, 0) [f(s1, 1)] f(s1, 2) b(s1, 2)" in message


def test_a_device_that_is_not_there() -> None:
    assert "device 1 never runs f(s1, 0)" in refused(PIPELINE, Schedule({0: SCHEDULE.events[0]}))


def test_fewer_micro_batches_than_the_schedule_has() -> None:
    message = refused(chain(2, 2), SCHEDULE)
    assert "runs f(s0, 2), and there are 2 micro-batches (0 to 1)" in message


def test_an_order_that_contradicts_the_data() -> None:
    broken = changed(SCHEDULE, 0, row("B0", "F0", "F1", "F2", "B1", "B2", segment="s0"))
    message = refused(PIPELINE, broken)
    assert "b(s0, 0) waits for f(s0, 0): its data" in message
    assert "f(s0, 0) waits for b(s0, 0): it stands before it on device 0" in message
    assert "device 0: [b(s0, 0)] [f(s0, 0)] f(s0, 1)" in message


def test_a_circle_through_two_devices() -> None:
    """Each row alone keeps its data; together they wait for each other."""
    first = row("F0", "B0", "F1", "F2", "B1", "B2", segment="s0")
    second = row("F0", "F1", "B0", "B1", "F2", "B2", segment="s1")
    message = refused(PIPELINE, Schedule({0: tuple(first), 1: tuple(second)}))
    for part in (
        "b(s0, 0) waits for b(s1, 0): its data",
        "b(s1, 0) waits for f(s1, 1): it stands before it on device 1",
        "f(s1, 1) waits for f(s0, 1): its data",
        "f(s0, 1) waits for b(s0, 0): it stands before it on device 0",
    ):
        assert part in message
    with pytest.raises(PlanError, match="never ends"):
        simulate(PIPELINE, Schedule({0: tuple(first), 1: tuple(second)}))


def test_shared_events_in_two_orders() -> None:
    pipeline = interlaced_chain(2, 2)
    schedule = make_schedule("gpipe", pipeline)
    events = list(schedule.events[1])
    first, second = events.index(Event("f", "embed", 0)), events.index(Event("f", "embed", 1))
    events[first], events[second] = events[second], events[first]
    message = refused(pipeline, changed(schedule, 1, events))
    assert "devices 0 and 1 run f(embed, 0) and f(embed, 1) together, but in different orders" in message


def test_an_event_on_one_of_two_devices() -> None:
    pipeline = interlaced_chain(2, 1)
    schedule = make_schedule("gpipe", pipeline)
    broken = changed(schedule, 1, [one for one in schedule.events[1] if one != Event("b", "head", 0)])
    assert "device 1 never runs b(head, 0), the backward of 'head' for micro-batch 0 (device 0 runs it)" in refused(
        pipeline, broken
    )


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Event("f", "s9", 0), "no segment is called 's9'"),
        (Event("x", "s0", 0), "'x' is no phase"),
        (Event("f", "s1", 0), "which lives on 1"),
        (Event("w", "s0", 0), "the backward of 's0' cannot be divided"),
        (Event("f", "s0", -1), "there are 3 micro-batches"),
        (Event("b", "s0", 2), "device 0 runs b(s0, 2) 2 times"),
    ],
)
def test_events_that_cannot_be(event: Event, message: str) -> None:
    assert message in refused(PIPELINE, changed(SCHEDULE, 0, (*SCHEDULE.events[0], event)))


def test_a_backward_without_gradient() -> None:
    pipeline = Pipeline((Segment("a", (0,), trains=False),), 1)
    schedule = Schedule({0: (Event("f", "a", 0), Event("b", "a", 0))})
    assert "'a' has no gradient" in refused(pipeline, schedule)
    check_schedule(pipeline, Schedule({0: (Event("f", "a", 0),)}))


def test_weight_gradients_before_their_backward() -> None:
    pipeline = chain(1, 1, splits=True)
    good = tuple(row("F0", "B0", "W0", segment="s0"))
    check_schedule(pipeline, Schedule({0: good}))
    check_schedule(pipeline, Schedule({0: good[:2]}))
    assert "w(s0, 0) waits for b(s0, 0)" in refused(pipeline, Schedule({0: (good[0], good[2], good[1])}))

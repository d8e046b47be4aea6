"""Schedules that users write, and one order of everything."""

from __future__ import annotations

import random

import pytest

from tests.order.cases import random_pipeline, random_schedule
from tests.order.shapes import chain, interlaced_chain
from weft.errors import PlanError
from weft.ir.schedule import Pipeline, Rows, Schedule, Segment
from weft.order import make_schedule
from weft.order.joint import joint
from weft.order.stage_names import said_schedule
from weft.order.steps import project

PIPELINE = chain(2, 3)


def read_schedule(pipeline: Pipeline, rows: Rows) -> Schedule:
    return said_schedule(pipeline, rows, (), {})


def test_rows_are_read() -> None:
    schedule = read_schedule(PIPELINE, {0: "F0 F1 B0 F2 B1 B2", 1: "f0 b0 f1 b1 f2 b2"})
    assert schedule == make_schedule("1f1b", PIPELINE)
    assert read_schedule(PIPELINE, dict(schedule.events)) == schedule


def test_what_is_printed_is_read_back() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        pipeline = random_pipeline(draw)
        schedule = random_schedule(pipeline, draw)
        lines = dict(line.split(":", 1) for line in str(schedule).splitlines())
        assert read_schedule(pipeline, {int(device): row for device, row in lines.items()}) == schedule


def test_names_with_blanks() -> None:
    pipeline = Pipeline((Segment("a b", (0,)), Segment("c", (0,), ("a b",))), 1)
    row = "F0(a b) F0(c) B0(c) B0(a b)"
    assert str(read_schedule(pipeline, {0: row})) == f"0: {row}"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({0: "F0 G1"}, "'G1' is no event"),
        ({0: "F0 F"}, "'F' is no event"),
        ({0: "F0 B0", 1: "F0 B0"}, "never runs f"),
        ({7: "F0"}, "device 7 holds none"),
    ],
)
def test_words_that_are_no_events(rows: dict[int, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_schedule(PIPELINE, rows)


def test_a_device_with_several_segments_names_them() -> None:
    with pytest.raises(PlanError, match="does not say which stage it runs; device 0 holds embed, s0, head") as caught:
        read_schedule(interlaced_chain(2, 1), {0: "F0"})
    assert caught.value.place == "device 0, event 0"


def test_one_order_of_everything() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        pipeline = random_pipeline(draw)
        schedule = random_schedule(pipeline, draw)
        graph = joint(pipeline, schedule)
        order = [graph.events[number] for number in graph.order()]
        assert project(pipeline, order) == schedule
        places = {event: place for place, event in enumerate(order)}
        assert all(places[need] < places[event] for event in order for need in pipeline.before(event))

"""Repeating patterns and the interlaced pipeline."""

from __future__ import annotations

import pytest

from tests.order.shapes import chain, interlaced_chain, vee
from weft.ir.schedule import Pipeline, Segment
from weft.order import Span, check_schedule, make_schedule, simulate
from weft.order.model import make_solver
from weft.order.pattern import best_pattern, edges, find_pattern
from weft.order.task import make_task


def spans(stages: int) -> dict[str, Span]:
    return {f"s{stage}": Span(1, 3, 0) for stage in range(stages)} | {"embed": Span(1, 1, 0), "head": Span(1, 1, 0)}


def test_interlaced_on_the_shape_of_the_paper() -> None:
    """F = 1, B = 3, E = H = h = e = 1, four stages, 256 micro-batches: at most 1.01 of 8 per micro-batch."""
    pipeline = interlaced_chain(4, 256)
    schedule = make_schedule("interlaced", pipeline, spans=spans(4))
    assert simulate(pipeline, schedule, spans(4)).makespan <= 1.01 * 8 * 256


@pytest.mark.parametrize("stages", [2, 3, 6, 8, 16])
def test_interlaced_has_no_idle_device_in_its_steady_state(stages: int) -> None:
    pattern = find_pattern(interlaced_chain(stages, 1), spans(stages))
    assert pattern.period == 8


def test_interlaced_with_several_blocks_everywhere() -> None:
    """An encoder and a decoder, each with its own embedding on all devices, and a head."""
    everywhere = (0, 1, 2, 3)
    segments = (
        Segment("embed", everywhere),
        Segment("s0", (0,), ("embed",)),
        Segment("s1", (1,), ("s0",)),
        Segment("target", everywhere),
        Segment("s2", (2,), ("s1", "target")),
        Segment("s3", (3,), ("s2", "s1")),
        Segment("head", everywhere, ("s3",)),
    )
    pipeline = Pipeline(segments, 32)
    times = {**spans(4), "target": Span(1, 1, 0)}
    assert find_pattern(pipeline, times).period == 10
    schedule = make_schedule("interlaced", pipeline, spans=times)
    assert simulate(pipeline, schedule, times).makespan <= 10 * 32 + 40


def test_interlaced_with_measured_times() -> None:
    times = {"embed": Span(0.31, 0.44, 0), "head": Span(0.62, 1.13, 0)}
    times |= {f"s{stage}": Span(1.07, 1.05, 1.02) for stage in range(4)}
    pipeline = interlaced_chain(4, 64)
    schedule = make_schedule("interlaced", pipeline, spans=times)
    work = 0.31 + 0.44 + 0.62 + 1.13 + 1.07 + 1.05 + 1.02
    assert simulate(pipeline, schedule, times).makespan <= 1.12 * 64 * work


@pytest.mark.parametrize("pipeline", [chain(4, 9), chain(3, 9, virtual=2), vee(3, 9)])
def test_patterns_of_other_shapes(pipeline: Pipeline) -> None:
    pattern = find_pattern(pipeline)
    assert pattern.period == 3 * len(pipeline.on(0))
    schedule = pattern.unroll(pipeline)
    check_schedule(pipeline, schedule)
    assert simulate(pipeline, schedule).makespan <= 8 * pattern.period + pattern.length


def test_a_period_shorter_than_the_work_has_no_pattern() -> None:
    pipeline = interlaced_chain(2, 1)
    task = make_task(pipeline, spans(2))
    assert task.least_period == 8
    assert best_pattern(pipeline, task, edges(task), period=7, solver=make_solver()) is None


def test_copies_of_a_pattern_never_meet() -> None:
    task = make_task(interlaced_chain(4, 1), spans(4))
    pattern = find_pattern(interlaced_chain(4, 1), spans(4))
    for device in range(4):
        moments = [
            (start + offset) % pattern.period
            for kind, start in pattern.starts.items()
            if device in task.devices[kind]
            for offset in range(task.spans[kind])
        ]
        assert sorted(moments) == list(range(pattern.period))

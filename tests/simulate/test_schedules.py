"""Schedules as traces: with messages that take no time, the simulator finds what `weft.order.timing` finds on paper."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import settings

from tests.order.cases import random_pipeline, random_schedule
from tests.order.shapes import chain, vee
from tests.simulate.jobs import Plain, issue, job, post, run, take, wait
from weft.ir.schedule import Event, Pipeline, Schedule
from weft.order.names import make_schedule
from weft.order.timing import Span, Spans
from weft.order.timing import simulate as on_paper
from weft.simulate.engine import simulate
from weft.simulate.trace import Event as Played
from weft.simulate.trace import Job


def traced(pipeline: Pipeline, schedule: Schedule, spans: Spans) -> Job:
    """What the devices do: take what an event needs of others, run it together, post it."""
    every = set(schedule.every())
    readers: dict[Event, list[Event]] = {event: [] for event in every}
    for event in every:
        for need in pipeline.before(event):
            readers[need].append(event)
    devices = {event: pipeline.by_name[event.segment].devices for event in every}
    rows: list[list[Played]] = []
    calls = count()
    for device in range(max(pipeline.devices) + 1):
        row: list[Played] = []
        taken = set[Event]()
        for event in schedule.events.get(device, ()):
            for need in pipeline.before(event):
                if device not in devices[need] and need not in taken:
                    taken.add(need)
                    row.append(take(devices[need][0], str(need)))
            if len(devices[event]) > 1:
                call = next(calls)
                row += [issue(call, 0, *devices[event]), wait(call)]
            whole = event.phase != "b" or (event.segment, event.micro) not in schedule.divided
            row.append(run(spans[event.segment].of(event.phase, whole)))
            if device == devices[event][0]:
                to = {peer for reader in readers[event] for peer in devices[reader]} - set(devices[event])
                row += [post(peer, str(event)) for peer in sorted(to)]
        rows.append(row)
    return job(*rows)


def spans_of(pipeline: Pipeline, draw: random.Random) -> Spans:
    return {
        one.name: Span(draw.choice([1, 2, 3.5]), draw.choice([1, 2.25]), draw.choice([0.5, 1]))
        for one in pipeline.segments
    }


def agree(pipeline: Pipeline, schedule: Schedule, draw: random.Random) -> None:
    spans = spans_of(pipeline, draw)
    paper = on_paper(pipeline, schedule, spans)
    found = simulate(traced(pipeline, schedule, spans), Plain())
    assert found.seconds == pytest.approx(paper.makespan)
    assert [found.ranks[device].busy for device in paper.busy] == pytest.approx(list(paper.busy.values()))
    assert found.exposed == 0 or any(len(one.devices) > 1 for one in pipeline.segments)
    assert sum(took for _, took in found.critical_path()) == pytest.approx(found.seconds)


@pytest.mark.parametrize("stages", range(2, 7))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_schedules_by_name(name: str, stages: int) -> None:
    draw = random.Random(f"{name} {stages}")
    for _ in range(4):
        micro = stages * draw.randint(1, 3)
        if name == "zb-v":
            pipeline = vee(stages, micro)
        else:
            pipeline = chain(stages, micro, virtual=2 if name == "interleaved" else 1, splits=name == "zb-h1")
        agree(pipeline, make_schedule(name, pipeline), draw)


def test_bubble_of_1f1b() -> None:
    """The bubble of p stages and m micro-batches is (p - 1) / (m + p - 1) of the step."""
    pipeline = chain(4, 8)
    spans = {one.name: Span(1, 1, 1) for one in pipeline.segments}
    found = simulate(traced(pipeline, make_schedule("1f1b", pipeline), spans), Plain())
    assert found.bubble == pytest.approx(3 / 11)


@pytest.mark.parametrize("seed", range(settings.default.max_examples))
def test_random_schedules(seed: int) -> None:
    draw = random.Random(seed)
    pipeline = random_pipeline(draw)
    agree(pipeline, random_schedule(pipeline, draw), draw)

"""Random graphs, assignments and schedules: valid ones pass and run, invalid ones are refused."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.order.cases import all_events, ancestors, changed, ends, random_pipeline, random_schedule
from weft.errors import PlanError
from weft.ir.schedule import Event, Pipeline, Schedule
from weft.order import check_schedule, make_schedule, peaks, simulate, table
from weft.order.timing import Span


def valid_case(seed: int) -> None:
    draw = random.Random(seed)
    pipeline = random_pipeline(draw)
    schedule = random_schedule(pipeline, draw)
    assert ends(pipeline, schedule)
    check_schedule(pipeline, schedule)
    spans = {one.name: Span(*(draw.randint(0, 3) for _ in "fbw")) for one in pipeline.segments}
    timeline = simulate(pipeline, schedule, spans)
    for event, start in timeline.starts.items():
        assert all(timeline.ends[need] <= start for need in pipeline.before(event))
    for row in schedule.events.values():
        assert all(timeline.ends[one] <= timeline.starts[two] for one, two in pairwise(row))
    for device, peak in peaks(pipeline, schedule).items():
        assert peak == most_live(pipeline, schedule.events[device])
    assert "idle" in table(pipeline, timeline)


def most_live(pipeline: Pipeline, row: tuple[Event, ...]) -> int:
    """Counted anew at every event: forwards begun whose last event has not come."""
    lasts = {(one.segment, one.micro): place for place, one in enumerate(row) if one.phase != "f"}
    lives = [
        (place, lasts[event.segment, event.micro])
        for place, event in enumerate(row)
        if event.phase == "f" and pipeline.by_name[event.segment].trains
    ]
    return max((sum(first <= now <= last for first, last in lives) for now in range(len(row))), default=0)


def spoil(pipeline: Pipeline, schedule: Schedule, draw: random.Random) -> tuple[str, Schedule] | None:
    """The schedule with one fault, or None where there is no place for that fault."""
    device = draw.choice([one for one, row in schedule.events.items() if row])
    row = list(schedule.events[device])
    kind = draw.choice(["dropped", "doubled", "swapped", "circle", "apart", "beyond", "strange"])
    if kind == "dropped":
        event = draw.choice([one for one in row if one.phase != "w" or len(pipeline.by_name[one.segment].devices) > 1])
        row.remove(event)
    elif kind == "doubled":
        row.insert(draw.randint(0, len(row)), draw.choice(row))
    elif kind == "beyond":
        row.append(Event("f", row[0].segment, pipeline.microbatches))
    elif kind == "strange":
        row.append(Event("f", "nobody", 0))
    elif kind == "apart":
        return apart(pipeline, schedule, draw)
    else:
        # An event before one of its ancestors: the next one, or one that other devices lie between.
        pairs = [(one, two) for one in row for two in row if one in ancestors(pipeline, two)]
        near = {(one, two) for one, two in pairs if one in pipeline.before(two)}
        pairs = [pair for pair in pairs if (pair in near) == (kind == "swapped")]
        if not pairs:
            return None
        first, second = draw.choice(pairs)
        row.remove(second)
        row.insert(row.index(first), second)
    return kind, changed(schedule, device, row)


def apart(pipeline: Pipeline, schedule: Schedule, draw: random.Random) -> tuple[str, Schedule] | None:
    """Two events that devices share, the other way round on one of them."""
    shared = [
        (device, one, two)
        for device, row in schedule.events.items()
        for one, two in pairwise(row)
        if set(pipeline.by_name[one.segment].devices) & set(pipeline.by_name[two.segment].devices) - {device}
    ]
    if not shared:
        return None
    device, one, two = draw.choice(shared)
    row = list(schedule.events[device])
    place = row.index(one)
    row[place : place + 2] = two, one
    return "apart", changed(schedule, device, row)


def invalid_case(seed: int) -> str | None:
    draw = random.Random(seed)
    pipeline = random_pipeline(draw)
    spoilt = spoil(pipeline, random_schedule(pipeline, draw), draw)
    if spoilt is None:
        return None
    kind, schedule = spoilt
    with pytest.raises(PlanError) as caught:
        check_schedule(pipeline, schedule)
    wanted = {
        "dropped": "never runs",
        "doubled": "times",
        "swapped": "waits for",
        "circle": "waits for",
        "apart": "in different orders",
        "beyond": "micro-batches (0 to",
        "strange": "no segment is called",
    }[kind]
    assert wanted in caught.value.message or "in different orders" in caught.value.message, caught.value
    assert caught.value.remedy
    return kind


def shuffled_case(seed: int) -> bool:
    """Rows of any order: the check says yes exactly where the devices come to the end."""
    draw = random.Random(seed)
    pipeline = random_pipeline(draw)
    schedule = random_schedule(pipeline, draw)
    rows = {device: list(row) for device, row in schedule.events.items()}
    for _ in range(draw.randint(1, 3)):
        row = rows[draw.choice(list(rows))]
        if len(row) > 1:
            place = draw.randrange(len(row) - 1)
            row[place], row[place + 1] = row[place + 1], row[place]
    schedule = Schedule({device: tuple(row) for device, row in rows.items()})
    truth = ends(pipeline, schedule)
    if truth:
        check_schedule(pipeline, schedule)
    else:
        with pytest.raises(PlanError):
            check_schedule(pipeline, schedule)
    return truth


def named_case(seed: int) -> None:
    draw = random.Random(seed)
    pipeline = random_pipeline(draw)
    spans = {one.name: Span(*(draw.choice([0, 1, 2, 0.37]) for _ in "fbw")) for one in pipeline.segments}
    splits = any(one.trains and one.splits for one in pipeline.segments)
    for name in ("gpipe", "1f1b", "interlaced", "inference", *(["zb-h1"] if splits else [])):
        # make_schedule checks what it makes.
        schedule = make_schedule(name, pipeline, spans=spans)
        used = pipeline.without_gradient() if name == "inference" else pipeline
        assert ends(used, schedule)
        assert simulate(used, schedule, spans).makespan >= 0


def invalid_cases(count: int, first: int) -> list[str]:
    found: list[str] = []
    seed = first
    while len(found) < count:
        kind = invalid_case(seed)
        seed += 1
        if kind is not None:
            found.append(kind)
    return found


def test_valid_schedules_pass_and_run() -> None:
    for seed in range(300):
        valid_case(seed)


def test_invalid_schedules_are_refused() -> None:
    kinds = invalid_cases(300, 10_000)
    assert set(kinds) == {"dropped", "doubled", "swapped", "circle", "apart", "beyond", "strange"}


def test_check_agrees_with_running() -> None:
    truths = [shuffled_case(seed) for seed in range(20_000, 20_200)]
    assert 40 < sum(truths) < 160


def test_named_schedules_take_any_pipeline() -> None:
    for seed in range(30_000, 30_100):
        named_case(seed)


@pytest.mark.full
def test_many_random_schedules() -> None:
    for seed in range(100_000, 103_000):
        valid_case(seed)
        shuffled_case(seed)
    for seed in range(100_000, 101_000):
        named_case(seed)
    invalid_cases(3000, 200_000)


def test_every_event_is_counted() -> None:
    draw = random.Random(1)
    pipeline = random_pipeline(draw)
    events = set(all_events(pipeline, draw))
    assert {event for event in events if event.phase == "f"} == {
        Event("f", one.name, micro) for one in pipeline.segments for micro in range(pipeline.microbatches)
    }

"""Relations completed and schedules searched."""

from __future__ import annotations

import random
import signal
from dataclasses import replace

import pytest

from tests.order.cases import random_pipeline, random_schedule
from tests.order.shapes import chain, interlaced_chain, nf1b_relations, one_f_one_b_relations, recycled, vee
from weft.errors import PlanError
from weft.ir.schedule import Before, Event, Micro, Pipeline, Schedule, Segment
from weft.order import Span, check_schedule, make_schedule, simulate
from weft.order.relations import check_relations, expand
from weft.order.search import Found, complete

M = Micro()


def f(name: str, micro: int | Micro) -> Event:
    return Event("f", name, micro)


def b(name: str, micro: int | Micro) -> Event:
    return Event("b", name, micro)


def keeps(pipeline: Pipeline, schedule: Schedule, relations: tuple[Before, ...]) -> bool:
    timeline = simulate(pipeline, schedule)
    return all(timeline.ends[one] <= timeline.starts[two] for one, two in expand(pipeline, relations))


def test_relations_hold_for_every_micro_batch() -> None:
    pipeline = chain(2, 4)
    pairs = expand(pipeline, [Before(f("s0", M + 2), b("s0", M))])
    assert pairs == ((f("s0", 2), b("s0", 0)), (f("s0", 3), b("s0", 1)))
    assert expand(pipeline, [Before(f("s0", M), f("s0", M + 4))]) == ()
    assert expand(pipeline, [Before(f("s0", M - 1), f("s1", M))])[0] == (f("s0", 0), f("s1", 1))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("count", [6, 64])
@pytest.mark.parametrize("constrained", [True, False])
def test_1f1b_is_found(count: int, constrained: bool, named: bool) -> None:
    """Solved whole and as a pattern, from the named schedule and from nothing."""
    pipeline = chain(4, count)
    relations = one_f_one_b_relations(pipeline) if constrained else ()
    found = complete(pipeline, relations, named=named)
    assert found.makespan == 3 * count + 9 and found.proven
    assert keeps(pipeline, found.schedule, relations)
    if constrained:
        assert found.schedule == make_schedule("1f1b", pipeline)


def test_the_named_schedule_keeps_its_relations() -> None:
    pipeline = chain(5, 9)
    assert keeps(pipeline, make_schedule("1f1b", pipeline), one_f_one_b_relations(pipeline))
    wide = recycled(3, 9)
    assert keeps(wide, make_schedule("nf1b", wide), nf1b_relations(wide, distance=1))


def test_divided_backwards_are_shorter() -> None:
    pipeline = chain(3, 5, splits=True)
    found = complete(pipeline, named=False)
    assert found.makespan == 3 * 5 + 2 and found.proven


@pytest.mark.parametrize("pipeline", [interlaced_chain(2, 5), vee(2, 3), recycled(2, 4), chain(2, 5, virtual=2)])
def test_search_is_no_worse_than_the_named_schedules(pipeline: Pipeline) -> None:
    spans = {one.name: Span(1, 2, 0) for one in pipeline.segments}
    found = complete(pipeline, spans=spans, named=False, seconds=10)
    for name in ("1f1b", "interlaced", "gpipe"):
        schedule = make_schedule(name, pipeline, spans=spans)
        assert found.makespan <= simulate(pipeline, schedule, spans).makespan


def test_many_micro_batches_by_pattern() -> None:
    """The paper's shape by search: the period has no idle time, warm-up and cool-down are the solver's."""
    pipeline = interlaced_chain(4, 64)
    spans = {f"s{stage}": Span(1, 3, 0) for stage in range(4)} | {"embed": Span(1, 1, 0), "head": Span(1, 1, 0)}
    found = complete(pipeline, spans=spans, named=False, seconds=20)
    assert "pattern" in found.method
    assert found.makespan <= 8 * 64 + 20


def test_the_same_search_gives_the_same_schedule() -> None:
    def search() -> Found:
        return complete(chain(3, 4), named=False)

    assert search().schedule == search().schedule


def test_relations_of_numbered_micro_batches() -> None:
    """The last micro-batch first: only a search that gives up their order finds it."""
    pipeline = chain(2, 3)
    relations = (Before(f("s0", 2), f("s0", 0)), Before(f("s0", 1), f("s0", 0)))
    found = complete(pipeline, relations)
    assert keeps(pipeline, found.schedule, relations)
    backwards = (Before(f("s0", M + 1), f("s0", M)),)
    found = complete(pipeline, backwards)
    assert [one.micro for one in found.schedule.events[0] if one.phase == "f"] == [2, 1, 0]


def test_relations_that_contradict_each_other() -> None:
    pipeline = chain(2, 4)
    guilty = (Before(f("s0", M + 1), b("s1", M)), Before(b("s1", M), f("s0", M + 1)))
    innocent = (Before(f("s0", M), f("s0", M + 1)), Before(b("s0", M), b("s0", M + 1)))
    with pytest.raises(PlanError, match="contradict each other") as caught:
        complete(pipeline, (*innocent, *guilty))
    assert all(str(one) in caught.value.message for one in guilty)
    assert not any(f"  {one}\n" in caught.value.message for one in innocent)


def test_a_relation_that_contradicts_the_data() -> None:
    with pytest.raises(PlanError, match="contradict the data") as caught:
        check_relations(chain(2, 4), [Before(f("s1", M), f("s0", M))])
    assert "f(s0, 0) before f(s1, 0)" in caught.value.message


def test_a_relation_that_no_device_sees_to() -> None:
    """Data may order events of different devices; a schedule cannot."""
    pipeline = chain(3, 4)
    complete(pipeline, [Before(f("s0", M), f("s2", M)), Before(b("s2", M + 1), b("s0", M + 1))])
    with pytest.raises(PlanError, match=r"no device runs both b\(s1, m\) and f\(s0, m\+2\)"):
        complete(pipeline, [Before(b("s1", M), f("s0", M + 2))])


@pytest.mark.parametrize(
    ("relation", "message"),
    [
        (Before(f("s7", M), f("s0", M)), "no segment is called 's7'"),
        (Before(Event("w", "s0", M), f("s0", M + 1)), "the backward of 's0' cannot be divided"),
        (Before(f("s0", 0), f("s0", 9)), "there are 4 micro-batches"),
    ],
)
def test_bad_relations(relation: Before, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        complete(chain(2, 4), [relation])
    assert caught.value.place == str(relation)


def test_a_search_does_not_grow_with_the_devices_of_a_stage() -> None:
    groups = [tuple(range(32 * stage, 32 * stage + 32)) for stage in range(3)]
    segments = [Segment(f"s{stage}", group, (f"s{stage - 1}",) * (stage > 0)) for stage, group in enumerate(groups)]
    wide, small = Pipeline(tuple(segments), 5), chain(3, 5)
    found, same = complete(wide, named=False), complete(small, named=False)
    assert found.makespan == same.makespan
    for stage, group in enumerate(groups):
        assert all(found.schedule.events[device] == same.schedule.events[stage] for device in group)


def test_measured_times() -> None:
    spans = {"a": Span(0.31, 0.7, 0.2), "b": Span(0.5, 0.9, 0.33)}
    pipeline = Pipeline((Segment("a", (0,)), Segment("b", (1,), ("a",))), 4)
    found = complete(pipeline, spans=spans, named=False)
    check_schedule(pipeline, found.schedule)
    assert found.makespan <= simulate(pipeline, make_schedule("1f1b", pipeline), spans).makespan * 1.01


@pytest.mark.full
@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("count", [16, 128])
def test_large_searches(stages: int, constrained: bool, count: int) -> None:
    pipeline = chain(stages, count)
    relations = one_f_one_b_relations(pipeline) if constrained else ()
    found = complete(pipeline, relations, named=False, seconds=60)
    assert found.makespan <= simulate(pipeline, make_schedule("1f1b", pipeline)).makespan
    assert found.seconds < 65


def random_search(seed: int) -> None:
    """The solver against many random orders and the named schedules."""
    draw = random.Random(seed)
    pipeline = random_pipeline(draw)
    while len(pipeline.segments) * pipeline.microbatches > 10:
        pipeline = random_pipeline(draw)
    least = draw.choice([0, 1, 1])
    spans = {one.name: Span(*(draw.randint(least, 2) for _ in "fbw")) for one in pipeline.segments}
    found = complete(pipeline, spans=spans, named=False, seconds=10)
    assert found.proven
    assert simulate(pipeline, found.schedule, spans).makespan == found.makespan
    if not least:
        return  # what takes no time is rounded up: the schedule holds, and may be a little longer
    for _ in range(20):
        schedule = random_schedule(pipeline, draw)
        assert found.makespan <= simulate(pipeline, schedule, spans).makespan
    assert complete(pipeline, spans=spans, seconds=10).makespan == found.makespan


def test_random_searches() -> None:
    for seed in range(12):
        random_search(seed)


@pytest.mark.full
def test_many_random_searches() -> None:
    for seed in range(1000, 1150):
        random_search(seed)


@pytest.mark.full
def test_many_random_patterns() -> None:
    """Sixty micro-batches of any pipeline: patterns, from named schedules and from nothing."""
    for seed in range(40):
        draw = random.Random(seed)
        pipeline = replace(random_pipeline(draw), microbatches=60)
        spans = {one.name: Span(*(draw.choice([1, 2, 3, 0.37]) for _ in "fbw")) for one in pipeline.segments}
        relations = tuple(Before(f(one.name, M), f(one.name, M + 1)) for one in pipeline.segments)
        found = complete(pipeline, relations[: draw.randint(0, 3)], spans=spans, seconds=5)
        # complete() proves what it returns.
        assert simulate(pipeline, found.schedule, spans).makespan == found.makespan


def test_the_solver_leaves_ctrl_c_to_python() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        complete(chain(2, 4), named=False, seconds=5)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)

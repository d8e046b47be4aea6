"""Routes one by one: which copy is taken, which share an addend goes to, which devices meet."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from tests.cost.layouts import everything, grid, layout
from weft.ir.layout import COPY, PARTIAL, Layout, split
from weft.ir.program import Move
from weft.ir.routes import Routing
from weft.lower.transfer import Transfers

ROWS, COLUMNS = split(0), split(1)
WIDE = (2048, 1024)


def ends(source: Layout, target: Layout) -> list[tuple[int, int]]:
    return [(route.source_device, route.target_device) for route in Routing(source, target).all]


def test_routes_of_a_device_are_those_of_all_that_touch_it() -> None:
    layouts, draw = everything(), random.Random(3)
    for _ in range(300):
        source, target = draw.choice(layouts), draw.choice(layouts)
        routing = Routing(source, target)
        for device in range(12):
            touching = [r for r in routing.all if device in (r.source_device, r.target_device)]
            assert list(routing.of(device)) == touching
            assert list(routing.into(device)) == [r for r in touching if r.target_device == device]
        assert routing.is_local == all(r.source_device == r.target_device for r in routing.all)


def test_groups_are_closed_and_no_larger_than_needed() -> None:
    layouts, draw = everything(), random.Random(4)
    for _ in range(200):
        source, target = draw.choice(layouts), draw.choice(layouts)
        routing = Routing(source, target)
        component = {device: {device} for device in range(12)}
        for route in routing.all:
            joined = component[route.source_device] | component[route.target_device]
            component.update(dict.fromkeys(joined, joined))
        for device in {*source.grid.cells_on, *target.grid.cells_on}:
            assert set(routing.group(device)) == component[device]


def test_a_copy_on_the_same_device_is_taken() -> None:
    target = layout(grid((2, 2), (3, 2, 1, 0)), (ROWS, COLUMNS))
    assert sorted(ends(layout(grid((4,)), (COPY,)), target)) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    crossed = layout(grid((2, 2), (0, 1, 1, 0)), (ROWS, COPY))
    assert all(s == t for s, t in ends(crossed, layout(crossed.grid, (COPY, COPY))))


def test_copies_elsewhere_take_turns() -> None:
    source = layout(grid((2, 4)), (ROWS, COPY))
    target = layout(grid((8,), tuple(range(8, 16))), (COPY,))
    assert set(Counter(s for s, _ in ends(source, target)).values()) == {2}


def test_addends_keep_their_share_on_the_same_grid() -> None:
    source = layout(grid((2, 2)), (PARTIAL, PARTIAL))
    assert sorted(ends(source, layout(grid((2, 2)), (PARTIAL, COPY)))) == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (2, 3), (3, 2), (3, 3),
    ]  # fmt: skip


def test_addends_stay_on_their_device_on_another_grid() -> None:
    source = layout(grid((4,)), (PARTIAL,))
    assert all(s == t for s, t in ends(source, layout(grid((2, 2), (3, 1, 0, 2)), (PARTIAL, PARTIAL))))


def test_addends_spread_over_shares_elsewhere() -> None:
    source = layout(grid((4,)), (PARTIAL,))
    assert Counter(t for _, t in ends(source, layout(grid((2,), (8, 9)), (PARTIAL,)))) == {8: 2, 9: 2}


def test_a_whole_value_enters_the_first_share_only() -> None:
    target = layout(grid((2, 2)), (PARTIAL, PARTIAL))
    assert ends(layout(grid((2, 2)), (COPY, COPY)), target) == [(0, 0)]


def test_every_addend_of_a_sum_is_listed_in_the_same_order_for_all_copies() -> None:
    source = layout(grid((2, 2), (3, 0, 1, 2)), (PARTIAL, COPY))
    found = Routing(source, layout(grid((2, 2), (3, 0, 1, 2)), (COPY, COPY)))
    assert [route.source_device for route in found.into(0)] == [0, 2]
    assert [route.source_device for route in found.into(3)] == [3, 1]


def test_a_scalar_has_routes_and_an_empty_tensor_none() -> None:
    one, other = grid((2,)), grid((2,), (2, 3))
    assert ends(layout(one, (COPY,), shape=()), layout(other, (COPY,), shape=())) == [(0, 2), (1, 3)]
    assert ends(layout(one, (COPY,), shape=(3, 0)), layout(other, (COPY,), shape=(3, 0))) == []


def test_a_sum_over_a_fiber_is_an_all_reduce_and_one_over_slots_is_not() -> None:
    plain = Move("all_reduce", layout(grid((2, 2)), (PARTIAL, COPY)), layout(grid((2, 2)), (COPY, COPY)))
    assert Routing(plain.source, plain.target).group(3) == (1, 3)
    made = Transfers().of(plain, 3)
    assert made is not None
    assert (made.kind, made.group, made.sends, made.receives) == ("all_reduce", (1, 3), (), ())
    assert Transfers().of(plain, 4) is None
    twice = grid((2, 2), (0, 0, 1, 1))
    slots = Transfers().of(Move("all_reduce", layout(twice, (PARTIAL, ROWS)), layout(twice, (COPY, ROWS))), 0)
    assert slots is not None
    assert (slots.kind, slots.add, len(slots.receives), len(slots.shapes)) == ("exchange", True, 4, 2)


def test_a_device_that_only_gives_ends_with_nothing() -> None:
    made = Transfers().of(Move("exchange", layout(grid((2,)), (ROWS,)), layout(grid((1,), (1,)), (COPY,))), 0)
    assert made is not None
    assert (made.kind, made.group, made.shapes, len(made.sends)) == ("exchange", (0, 1), (), 1)


@pytest.mark.parametrize(
    "before, after, links",
    [
        ((ROWS, PARTIAL), (ROWS, COPY), 16),
        ((ROWS, COLUMNS), (ROWS, COPY), 16),
        ((ROWS, PARTIAL), (ROWS, COLUMNS), 16),
        ((COPY, ROWS), (COPY, COLUMNS), 16),
        ((PARTIAL, COLUMNS), (ROWS, COLUMNS), 256),
    ],
)
def test_a_device_of_a_large_grid_sees_only_its_fiber(before: tuple, after: tuple, links: int) -> None:
    large = grid((128, 8))
    source, target = layout(large, before, shape=WIDE), layout(large, after, shape=WIDE)
    start = time.process_time()
    found = Routing(source, target).of(517)
    made = Transfers().of(Move("all_to_all", source, target), 517)
    assert time.process_time() - start < 1.5
    assert len(found) == links - 1  # the one that stays is both into and out of the device
    assert made is not None and len(made.group) == links // 2 and 517 in made.group

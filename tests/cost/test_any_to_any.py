"""Any layout reaches any layout, exactly, by routes and by transfers."""

from __future__ import annotations

import itertools
import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.executor import Parts, check_parts, make_parts, run_routes, run_transfers, whole_tensor
from tests.cost.layouts import SHAPE, everything, grid, layout
from weft.cost.links import default_links
from weft.cost.moves import GridMoves
from weft.cost.refine import coalesce, common, same_parts
from weft.cost.reshard import Resharder
from weft.ir.layout import COPY, PARTIAL, Layout, split, verify_layout
from weft.ir.program import Move
from weft.ir.routes import Routing

LAYOUTS = everything()
WHOLE = whole_tensor(SHAPE)


@cache
def parts_of(found: Layout) -> Parts:
    return make_parts(found, WHOLE)


CHUNKS = 16
BYTES = (8, 1 << 22)
"""Per element: with few bytes latencies decide on the path, with many the bytes."""


def carry(moves: tuple[Move, ...], source: Layout, parts: Parts, whole: np.ndarray) -> tuple[Layout, Parts]:
    """Run moves by each device's transfers and look at every part on the way."""
    now = source
    for move in moves:
        verify_layout(move.target)
        assert same_parts(now, move.source)
        parts, now = run_transfers(move, parts), move.target
        check_parts(now, parts, whole)
    return now, parts


def carry_twice(moves: tuple[Move, ...], source: Layout, parts: Parts, whole: np.ndarray) -> Layout:
    """By transfers, and by routes: the same to the last bit."""
    now, by_transfers = carry(moves, source, parts, whole)
    for move in moves:
        parts = run_routes(move, parts)
    assert parts.keys() == by_transfers.keys()
    assert all((parts[at] == by_transfers[at]).all() for at in parts)
    return now


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_sampled_pairs(chunk: int) -> None:
    draw = random.Random(chunk)
    resharder, itemsize = Resharder(default_links("gloo" if chunk % 2 else "nccl")), BYTES[chunk // 2 % 2]
    for _ in range(2000 // CHUNKS):
        source, target = draw.choice(LAYOUTS), draw.choice(LAYOUTS)
        reached = carry_twice(resharder.path(source, target, itemsize), source, parts_of(source), WHOLE)
        assert same_parts(reached, target)


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_every_pair(number: int) -> None:
    """Gradients flow back between the gradients' layouts, partial ones among them: these are pairs of this list too."""
    resharder, itemsize = Resharder(default_links("nccl" if number % 2 else "gloo")), BYTES[number // 2 % 2]
    source = LAYOUTS[number]
    for target in LAYOUTS:
        reached, _ = carry(resharder.path(source, target, itemsize), source, parts_of(source), WHOLE)
        assert same_parts(reached, target)


def test_the_parts_made_for_these_tests_are_themselves_right() -> None:
    for found in LAYOUTS:
        verify_layout(found)
        check_parts(found, parts_of(found), WHOLE)


def test_layouts_on_a_common_grid_hold_the_same_parts() -> None:
    draw, found = random.Random(0), 0
    for _ in range(1000):
        source, target = coalesce(draw.choice(LAYOUTS)), coalesce(draw.choice(LAYOUTS))
        pair = common(source, target)
        if pair:
            found += 1
            assert pair[0].grid == pair[1].grid
            assert same_parts(pair[0], source) and same_parts(pair[1], target)
    assert found > 100


def test_grid_moves_stay_on_the_fibers_of_the_axes_they_change() -> None:
    draw, found = random.Random(1), 0
    while found < 60:
        pair = common(coalesce(draw.choice(LAYOUTS)), coalesce(draw.choice(LAYOUTS)))
        if pair is None:
            continue
        found += 1
        for move, seconds in GridMoves(pair[1], 8, default_links("nccl")).after(pair[0]):
            assert seconds > 0
            changed = {i for i, role in enumerate(move.source.roles) if role != move.target.roles[i]}
            # Between tables of one dim no role changes: the axes that split it do the work.
            sorted_dims = [dim for dim, table in enumerate(move.source.ranges) if table != move.target.ranges[dim]]
            axes = changed or {axis for dim in sorted_dims for axis in move.source.axes_of[dim]}
            cells = move.source.grid.cells_on
            for route in Routing(move.source, move.target).all:
                (here,), (there,) = cells[route.source_device], cells[route.target_device]
                assert all(a == b for i, (a, b) in enumerate(zip(here, there, strict=True)) if i not in axes), move


SIZES = ((), (1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (4, 2), (2, 2, 2), (1, 3, 2))
STYLES = ("even", "uneven", "empty", "grouped", "reversed")


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Any grid, any devices (repeated or not), any roles, any table."""
    sizes = draw(st.sampled_from(SIZES))
    cells = int(np.prod(sizes, dtype=int))
    if draw(st.booleans()):
        devices = draw(st.permutations(range(max(cells, 6))))[:cells]
    else:
        devices = draw(st.lists(st.integers(0, 5), min_size=cells, max_size=cells))
    choices = [split(dim) for dim in range(len(shape))] + [COPY, PARTIAL]
    roles = tuple(draw(st.sampled_from(choices)) for _ in sizes)
    return layout(grid(sizes, tuple(devices)), roles, draw(st.sampled_from(STYLES)), shape)


@given(st.data())
def test_any_shape_any_devices(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    source, target = data.draw(layouts(shape)), data.draw(layouts(shape))
    whole = whole_tensor(shape)
    parts = make_parts(source, whole)
    check_parts(source, parts, whole)
    for backend, itemsize in itertools.product(("gloo", "nccl"), BYTES):
        moves = Resharder(default_links(backend)).path(source, target, itemsize)
        assert same_parts(carry_twice(moves, source, parts, whole), target)
        assert bool(moves) != same_parts(source, target)

"""Any layout reaches any layout, exactly, by routes and by transfers."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.executor import Parts, check_parts, make_parts, run_routes, run_transfers, whole_tensor
from tests.cost.layouts import SHAPE, everything, grid, layout
from weft.cost.links import default_links
from weft.cost.refine import coalesce, common, same_parts
from weft.cost.reshard import Resharder
from weft.ir.layout import COPY, PARTIAL, Layout, split, verify_layout
from weft.ir.program import Move

LAYOUTS = everything()
WHOLE = whole_tensor(SHAPE)
PARTS = {found: make_parts(found, WHOLE) for found in LAYOUTS}
CHUNKS = 16


def carry(source: Layout, target: Layout, resharder: Resharder) -> None:
    """Run the cheapest path, twice, and look at every part."""
    check_path(resharder.path(source, target, 8), source, target, PARTS[source], WHOLE)


def check_path(moves: tuple[Move, ...], source: Layout, target: Layout, parts: Parts, whole: np.ndarray) -> None:
    now = source
    for move in moves:
        verify_layout(move.target)
        assert same_parts(now, move.source)
        by_routes, by_transfers = run_routes(move, parts), run_transfers(move, parts)
        check_parts(move.target, by_routes, whole)
        assert by_routes.keys() == by_transfers.keys()
        assert all((by_routes[at] == by_transfers[at]).all() for at in by_routes)
        parts, now = by_routes, move.target
    assert same_parts(now, target)
    check_parts(target, parts, whole)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_sampled_pairs(chunk: int) -> None:
    draw = random.Random(chunk)
    resharder = Resharder(default_links("gloo" if chunk % 2 else "nccl"))
    for _ in range(2000 // CHUNKS):
        carry(draw.choice(LAYOUTS), draw.choice(LAYOUTS), resharder)


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_every_pair(number: int) -> None:
    resharder = Resharder(default_links("nccl" if number % 2 else "gloo"))
    for target in LAYOUTS:
        carry(LAYOUTS[number], target, resharder)


def test_the_parts_made_for_these_tests_are_themselves_right() -> None:
    for found in LAYOUTS:
        verify_layout(found)
        check_parts(found, PARTS[found], WHOLE)


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
    for backend in ("gloo", "nccl"):
        moves = Resharder(default_links(backend)).path(source, target, 4)
        check_path(moves, source, target, parts, whole)
        assert bool(moves) != same_parts(source, target)

"""Any layout reaches any layout, exactly, by routes and by transfers."""

from __future__ import annotations

import random

import pytest

from tests.cost.executor import check_parts, make_parts, run_routes, run_transfers, whole_tensor
from tests.cost.layouts import SHAPE, everything
from weft.cost.links import default_links
from weft.cost.refine import coalesce, common, same_parts
from weft.cost.reshard import Resharder
from weft.ir.layout import Layout, verify_layout

LAYOUTS = everything()
WHOLE = whole_tensor(SHAPE)
PARTS = {layout: make_parts(layout, WHOLE) for layout in LAYOUTS}
CHUNKS = 16


def carry(source: Layout, target: Layout, resharder: Resharder) -> None:
    """Run the cheapest path, twice, and look at every part."""
    moves = resharder.path(source, target, 8)
    parts, now = PARTS[source], source
    for move in moves:
        verify_layout(move.target)
        assert same_parts(now, move.source)
        by_routes, by_transfers = run_routes(move, parts), run_transfers(move, parts)
        check_parts(move.target, by_routes, WHOLE)
        assert by_routes.keys() == by_transfers.keys()
        assert all((by_routes[at] == by_transfers[at]).all() for at in by_routes)
        parts, now = by_routes, move.target
    assert same_parts(now, target)
    check_parts(target, parts, WHOLE)


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
    for layout in LAYOUTS:
        verify_layout(layout)
        check_parts(layout, PARTS[layout], WHOLE)


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

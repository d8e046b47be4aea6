"""Which path is cheapest: the ones every practitioner expects, and the ones that costs decide."""

from __future__ import annotations

import time

import pytest

from tests.cost.layouts import grid, layout
from weft.cost.links import DEFAULTS, Links, default_links
from weft.cost.refine import coalesce, common, express, same_parts
from weft.cost.reshard import Resharder
from weft.ir.layout import COPY, PARTIAL, Axis, Grid, Layout, Role, split

ROWS, COLUMNS = split(0), split(1)
LARGE, SMALL = (4096, 4096), (16, 16)
GLOO, NCCL = default_links("gloo"), default_links("nccl")
TWO, FOUR, SQUARE, OTHERS = grid((2,)), grid((4,)), grid((2, 2)), grid((4,), (4, 5, 6, 7))


def kinds(source: Layout, target: Layout, links: Links = GLOO) -> list[str]:
    return [move.kind for move in Resharder(links).path(source, target, 4)]


def on(where: Grid, *roles: Role, shape: tuple[int, ...] = LARGE, style: str = "even") -> Layout:
    return layout(where, roles, style, shape)


@pytest.mark.parametrize("links", DEFAULTS.values(), ids=DEFAULTS)
@pytest.mark.parametrize("shape", [SMALL, LARGE])
class TestOneAxis:
    def test_row_cut_to_replicated_is_one_all_reduce(self, links: Links, shape: tuple[int, ...]) -> None:
        for where in (TWO, FOUR):
            assert kinds(on(where, PARTIAL, shape=shape), on(where, COPY, shape=shape), links) == ["all_reduce"]

    def test_split_to_split_is_one_all_to_all(self, links: Links, shape: tuple[int, ...]) -> None:
        assert kinds(on(FOUR, ROWS, shape=shape), on(FOUR, COLUMNS, shape=shape), links) == ["all_to_all"]

    def test_replicated_to_split_or_partial_is_local(self, links: Links, shape: tuple[int, ...]) -> None:
        assert kinds(on(FOUR, COPY, shape=shape), on(FOUR, COLUMNS, shape=shape), links) == ["local"]
        assert kinds(on(FOUR, COPY, shape=shape), on(FOUR, PARTIAL, shape=shape), links) == ["local"]

    def test_between_range_tables_is_one_all_to_all(self, links: Links, shape: tuple[int, ...]) -> None:
        shape = (48, *shape)
        fused = on(FOUR, ROWS, shape=shape, style="grouped")
        assert kinds(on(FOUR, ROWS, shape=shape), fused, links) == ["all_to_all"]

    def test_nothing_to_do_is_no_move(self, links: Links, shape: tuple[int, ...]) -> None:
        assert kinds(on(SQUARE, ROWS, ROWS, shape=shape), on(FOUR, ROWS, shape=shape), links) == []
        assert kinds(on(SQUARE, PARTIAL, PARTIAL, shape=shape), on(FOUR, PARTIAL, shape=shape), links) == []


def test_partial_to_split_follows_the_backend() -> None:
    assert kinds(on(FOUR, PARTIAL), on(FOUR, ROWS), GLOO) == ["all_to_all"]
    assert kinds(on(FOUR, PARTIAL), on(FOUR, ROWS), NCCL) == ["reduce_scatter"]


def test_split_to_replicated_follows_the_backend() -> None:
    assert kinds(on(FOUR, ROWS), on(FOUR, COPY), NCCL) == ["all_gather"]
    assert kinds(on(FOUR, ROWS), on(FOUR, COPY), GLOO) == ["all_to_all"]


def test_two_axes_scatter_before_they_sum_if_bytes_count() -> None:
    source, target = on(SQUARE, PARTIAL, PARTIAL), on(SQUARE, ROWS, COPY)
    assert kinds(source, target, NCCL) == ["reduce_scatter", "all_reduce"]
    small = on(SQUARE, PARTIAL, PARTIAL, shape=SMALL), on(SQUARE, ROWS, COPY, shape=SMALL)
    assert kinds(*small, NCCL) == ["all_reduce", "local"]


def test_one_axis_of_two_moves_along_its_fiber_only() -> None:
    (move,) = Resharder(NCCL).path(on(SQUARE, ROWS, PARTIAL), on(SQUARE, ROWS, COPY), 4)
    assert (move.kind, move.source.grid, move.target.roles) == ("all_reduce", SQUARE, (ROWS, COPY))
    assert kinds(on(SQUARE, ROWS, PARTIAL), on(FOUR, ROWS), NCCL) == ["reduce_scatter"]
    assert kinds(on(FOUR, ROWS), on(SQUARE, ROWS, COLUMNS), NCCL) == ["all_to_all"]


def test_an_order_within_parts_is_local() -> None:
    ranges = (tuple(((16 * i + 8, 16 * i + 16), (16 * i, 16 * i + 8)) for i in range(4)), None)
    assert kinds(on(FOUR, ROWS, shape=(64, 4)), Layout((64, 4), FOUR, (ROWS,), ranges)) == ["local"]


def test_other_devices_get_an_exchange_and_sums_are_completed_first_when_cheaper() -> None:
    assert kinds(on(FOUR, ROWS), on(OTHERS, COLUMNS)) == ["exchange"]
    assert kinds(on(FOUR, PARTIAL, shape=SMALL), on(OTHERS, COPY, shape=SMALL)) == ["exchange"]
    for links in (GLOO, NCCL):
        found = kinds(on(FOUR, PARTIAL), on(OTHERS, COPY), links)
        assert len(found) == 2 and "exchange" in found
    one = grid((1,), (9,))
    assert kinds(on(FOUR, PARTIAL), on(one, COPY), NCCL) == ["reduce_scatter", "exchange"]


def test_copies_on_other_devices_are_completed_there() -> None:
    one = grid((1,), (9,))
    assert kinds(on(one, COPY), on(FOUR, COPY), NCCL) == ["exchange", "all_gather"]


def test_chunks_are_united_before_a_large_sum() -> None:
    chunks = grid((2, 4), (0, 0, 0, 0, 1, 1, 1, 1))
    found = Resharder(NCCL).path(on(chunks, PARTIAL, COLUMNS), on(chunks, COPY, COLUMNS), 4)
    assert [move.kind for move in found] == ["local", "all_reduce", "local"]
    assert same_parts(found[-1].target, on(chunks, COPY, COLUMNS))


def test_chunks_that_stay_on_their_device_move_locally() -> None:
    chunks = grid((2, 4), (0, 0, 0, 0, 1, 1, 1, 1))
    assert kinds(on(chunks, ROWS, COLUMNS), on(TWO, ROWS)) == ["local"]
    assert kinds(on(TWO, ROWS), on(chunks, ROWS, PARTIAL)) == ["local"]
    assert kinds(on(chunks, ROWS, PARTIAL), on(chunks, ROWS, COLUMNS)) == ["local"]


def test_the_same_parts_on_another_grid() -> None:
    assert same_parts(on(SQUARE, ROWS, ROWS), on(FOUR, ROWS))
    assert not same_parts(on(FOUR, ROWS), on(grid((4,), (3, 2, 1, 0)), ROWS))
    assert not same_parts(on(FOUR, COPY), on(FOUR, PARTIAL))
    swapped = grid((2, 2), (0, 2, 1, 3))
    assert same_parts(on(SQUARE, PARTIAL, COPY), on(swapped, COPY, PARTIAL))
    assert not same_parts(on(SQUARE, PARTIAL, COPY), on(swapped, PARTIAL, COPY))


@pytest.mark.parametrize(
    "source, target",
    [
        (on(grid((8,)), ROWS), on(grid((2, 4)), ROWS, COLUMNS)),
        (on(grid((2, 4)), ROWS, COPY), on(grid((4, 2)), COLUMNS, PARTIAL)),
        (on(grid((2, 4)), ROWS, COPY), on(grid((4, 2), (0, 4, 1, 5, 2, 6, 3, 7)), COLUMNS, PARTIAL)),
        (on(grid((2, 3)), ROWS, COPY), on(grid((6,)), COLUMNS)),
        (on(grid((6,)), ROWS), on(grid((3, 2)), PARTIAL, COLUMNS)),
        (on(grid((12,)), COPY), on(grid((3, 2, 2)), PARTIAL, COLUMNS, ROWS)),
        (on(grid((2, 6)), ROWS, COPY), on(grid((6, 2)), COLUMNS, PARTIAL)),
        (on(grid((4,), (0, 1, 3, 2)), ROWS), on(SQUARE, COPY, COLUMNS)),
    ],
)
def test_grids_of_the_same_devices_have_a_common_one(source: Layout, target: Layout) -> None:
    pair = common(source, target)
    assert pair is not None
    assert pair[0].grid == pair[1].grid
    assert same_parts(pair[0], source) and same_parts(pair[1], target)


def test_a_grid_that_cuts_across_has_no_common_one() -> None:
    across = grid((2, 2), (0, 1, 3, 2))
    assert express(on(SQUARE, ROWS, COLUMNS), across) is None
    assert common(on(SQUARE, ROWS, COLUMNS), on(across, ROWS, COLUMNS)) is None
    assert kinds(on(SQUARE, ROWS, COLUMNS), on(across, ROWS, COLUMNS)) == ["exchange"]


def test_axes_of_size_one_and_local_axes_disappear() -> None:
    found = coalesce(on(Grid((Axis("a", 1), Axis("b", 2), Axis("c", 2)), (0, 0, 1, 1)), PARTIAL, ROWS, COLUMNS))
    assert (found.grid, found.roles) == (Grid((Axis("b", 2),), (0, 1)), (ROWS,))


def test_a_path_is_searched_once_and_priced() -> None:
    resharder = Resharder(NCCL)
    first = resharder.path(on(FOUR, PARTIAL), on(FOUR, COPY), 4)
    assert resharder.path(on(FOUR, PARTIAL), on(FOUR, COPY), 4) is first
    bytes = 4 * 4096 * 4096
    assert resharder.seconds(on(FOUR, PARTIAL), on(FOUR, COPY), 4) == NCCL.seconds("all_reduce", 4, bytes)
    assert resharder.seconds(on(FOUR, COPY), on(FOUR, COPY), 4) == 0


def test_large_grids_are_searched_in_moments() -> None:
    large = grid((128, 8))
    start = time.process_time()
    assert kinds(on(large, ROWS, PARTIAL), on(large, ROWS, COPY)) == ["all_reduce"]
    assert kinds(on(large, PARTIAL, COLUMNS), on(large, ROWS, COLUMNS), NCCL) == ["reduce_scatter"]
    assert kinds(on(large, ROWS, COLUMNS), on(large, COPY, COLUMNS), NCCL) == ["all_gather"]
    there = grid((128, 8), tuple(range(1024, 2048)))
    assert kinds(on(large, ROWS, COPY), on(there, ROWS, COPY), NCCL) == ["exchange"]
    assert time.process_time() - start < 5

"""Embedding bags cut by rows, columns, bags and ids: all modes, both forms of input, weights and padding."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.ops.cells import Case, prove_cells, whole_case

SUM, MEAN, MAX = 0, 1, 2
OPTIONS = [
    (mode, padding, weighted)
    for mode, padding, weighted in itertools.product((SUM, MEAN, MAX), (None, 2), (False, True))
    if mode == SUM or not weighted
]


def floats(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def bags(*args: torch.Tensor | None, **options: object) -> Case:
    return prove_cells(whole_case("weft.embedding_bag", args, options))


@pytest.mark.parametrize(("mode", "padding", "weighted"), OPTIONS)
def test_rows_of_ids(mode: int, padding: int | None, weighted: bool) -> None:
    ids = torch.randint(7, (4, 5))
    ids[1] = 2
    it = bags(floats(7, 4), ids, None, floats(4, 5) if weighted else None, mode=mode, padding_idx=padding)
    assert {"v", "h", "b"} <= set(it.rule.cuttable)
    assert ("l" in it.rule.cuttable) == (mode == SUM or (mode == MEAN and padding is None))


@pytest.mark.parametrize(("mode", "padding", "weighted"), OPTIONS)
@pytest.mark.parametrize("last", [False, True])
def test_offsets(mode: int, padding: int | None, weighted: bool, last: bool) -> None:
    ids = torch.randint(7, (9,))
    # the second bag is empty, and so is the last unless its end is told
    offsets = torch.tensor([0, 3, 3, 8, 9])
    options = {"mode": mode, "padding_idx": padding, "include_last_offset": last}
    it = bags(floats(7, 4), ids, offsets, floats(9) if weighted else None, **options)
    assert set(it.rule.cuttable) == {"v", "h", "b"}


@pytest.mark.parametrize("mode", [SUM, MEAN])
def test_gradients_scaled_by_how_often_a_row_is_used(mode: int) -> None:
    it = bags(floats(5, 4), torch.randint(5, (4, 3)), mode=mode, scale_grad_by_freq=True)
    assert set(it.rule.cuttable) == {"h"}


def test_the_first_of_equal_rows_takes_the_gradient() -> None:
    table = torch.ones(6, 2, dtype=torch.float64)
    it = bags(table, torch.tensor([[4, 1, 2], [0, 5, 0]]), mode=MAX)
    assert it.gradients[0] is not None and not it.gradients[0][[1, 2, 5]].any()


def test_an_id_outside_the_table_is_refused() -> None:
    it = whole_case("weft.embedding_bag", (floats(6, 2), torch.tensor([[4, 1]])), {})
    it.values[1][0, 0] = 9
    with pytest.raises(RuntimeError, match="6 rows"):
        prove_cells(it, ["v"])

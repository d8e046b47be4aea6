"""What is particular about random operators; that any cut draws the same numbers is proven in `test_rules.py`."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import r
from tests.ops.cells import STREAM, cut, prove_cells, whole_case
from weft.runtime.random import whole_draw
from weft.runtime.sampling import dirichlet, gamma, geometric, multinomial, poisson


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_every_dim_of_random_numbers_may_be_cut() -> None:
    for target, args in (("aten.dropout.default", (r(3, 4, 5), 0.3, True)), ("aten.randn.default", ((3, 4, 5),))):
        assert len(whole_case(target, args, draw=0).rule.cuttable) == 3


def test_without_a_draw_dropout_is_itself_and_numbers_are_not_cut() -> None:
    it = prove_cells(whole_case("aten.dropout.default", (r(4, 6), 0.5, False)))
    assert torch.equal(it.results[0], it.values[0])
    assert not whole_case("aten.rand.default", ((3, 5),)).rule.cuttable


def test_attention_is_cut_by_batch_heads_queries_and_width() -> None:
    tensors = (r(2, 4, 4, 3), r(2, 4, 5, 3), r(2, 4, 5, 6))
    it = whole_case("aten.scaled_dot_product_attention.default", tensors)
    assert set(it.rule.cuttable) == {"b0", "h", "q", "v"}
    grouped = whole_case(
        "aten.scaled_dot_product_attention.default",
        (tensors[0], *(x[:, :2].contiguous() for x in tensors[1:])),
        {"enable_gqa": True},
    )
    assert {"g", "r"} <= set(grouped.rule.cuttable)


def test_two_draws_differ() -> None:
    first = whole_case("aten.dropout.default", (torch.ones(8, 8), 0.5, True), draw=0)
    second = whole_case("aten.dropout.default", (torch.ones(8, 8), 0.5, True), draw=1)
    assert not torch.equal(first.results[0], second.results[0])
    cut(second, [("d0", (1, 1))])


def test_samples_have_their_distribution() -> None:
    shape = (40_000,)
    draw = {"draw": whole_draw(0, shape), "stream": STREAM, "dtype": torch.float64}
    counts = poisson(torch.full(shape, 3.0), **draw)
    torch.testing.assert_close(
        torch.stack([counts.mean(), counts.var()]), torch.tensor([3.0, 3.0]).double(), atol=0.1, rtol=0
    )
    assert abs(geometric(0.25, **draw).mean().item() - 4) < 0.1
    for concentration in (0.3, 1.0, 4.5):
        found = gamma(torch.full(shape, concentration), **draw)
        assert abs(found.mean().item() - concentration) < 0.05 and abs(found.var().item() - concentration) < 0.2
    rows = torch.tensor([0.5, 1.0, 2.5]).double().expand(40_000, 3)
    shares = dirichlet(rows, draw=whole_draw(0, (40_000, 3)), stream=STREAM)
    torch.testing.assert_close(shares.sum(-1), torch.ones(40_000).double())
    torch.testing.assert_close(shares.mean(0), rows[0] / 4, atol=0.01, rtol=0)
    torch.testing.assert_close(shares.var(0), rows[0] / 4 * (1 - rows[0] / 4) / 5, atol=0.01, rtol=0)
    p = torch.tensor([0.1, 0.6, 0.3]).double()
    for replacement in (True, False):
        size = (40_000, 1 if replacement else 3)
        found = multinomial(p.expand(40_000, 3), 1, replacement, draw=whole_draw(1, size), stream=STREAM)
        torch.testing.assert_close(found.view(-1).bincount() / len(found), p.float(), atol=0.01, rtol=0)


def test_samples_without_replacement_are_distinct() -> None:
    found = multinomial(torch.ones(50, 4), 4, False, draw=whole_draw(0, (50, 4)), stream=STREAM)
    assert torch.equal(found.sort(-1).values, torch.arange(4).expand(50, 4))

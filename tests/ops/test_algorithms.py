"""What is particular about algorithms; that every cut of each of them is right is proven in `test_rules.py`."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import r
from tests.ops.cells import cut, cut_by, prove_cells, whole_case
from weft.errors import RuleError
from weft.ir.oplayout import Cut


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_all_dims_of_a_reduction_may_be_cut() -> None:
    for target in ("aten.softmax.int", "aten.max.dim", "aten.argmax.default", "aten.prod.dim_int", "aten.all.dim"):
        it = whole_case(target, (r(4, 6, 3) > 0 if "all" in target else r(4, 6, 3), 1))
        assert set(it.rule.cuttable) == {"d0", "d1", "d2"} and set(it.rule.algorithms) == {"d1"}


def test_std_of_equal_elements_has_no_gradient() -> None:
    it = whole_case("aten.std.correction", (torch.ones(2, 4, dtype=torch.float64), (1,)))
    assert it.gradients[0] is not None and not it.gradients[0].any()


def test_scores_that_are_all_masked() -> None:
    x = torch.full((1, 6), -torch.inf, dtype=torch.float64)
    prove_cells(whole_case("aten.logsumexp.default", (x, (1,))))


def test_statistics_that_an_algorithm_sums() -> None:
    layer = whole_case("aten.layer_norm.default", (r(3, 4, 6), (4, 6)))
    assert set(layer.rule.algorithms) == {"n0", "n1"} and len(layer.rule.cuttable) == 3
    group = whole_case("aten.group_norm.default", (r(3, 8, 4), 4, r(8), r(8), 1e-5))
    assert set(group.rule.cuttable) == {"n", "g", "c", "s0"} and set(group.rule.algorithms) == {"c", "s0"}


def test_batch_norm_leaves_its_running_statistics_alone() -> None:
    args = (r(4, 6), None, None, torch.zeros(6).double(), torch.ones(6).double(), True, 0.1, 1e-5, False)
    it = whole_case("aten.batch_norm.default", args, fixed=(1, 2))
    assert "n" in it.rule.algorithms
    before = [value.clone() for value in it.values]
    cut(it, [("c", (1, 1))])
    assert all(map(torch.equal, it.values, before))


def test_a_target_outside_the_classes_raises() -> None:
    it = whole_case("aten.cross_entropy_loss.default", (r(4, 6), torch.tensor([0, 1, 2, 3])))
    it.values[1][2] = 6
    with pytest.raises(IndexError, match="target 6 is out of bounds: neither a class"):
        cut(it, [("c", (1, 1))])


def test_losses_whose_gradients_torch_counts_otherwise_are_refused() -> None:
    with pytest.raises(RuleError, match="broadcast"):
        whole_case("aten.mse_loss.default", (r(4, 6), r(6)))


def test_targets_laid_end_to_end_are_refused() -> None:
    args = (r(9, 4, 5).log_softmax(2), torch.ones(12, dtype=torch.long), [9] * 4, [3] * 4)
    with pytest.raises(RuleError, match="end to end"):
        whole_case("aten.ctc_loss.IntList", args)


def test_vocabularies_are_cut_into_addends() -> None:
    it = whole_case("aten.embedding.default", (r(7, 4), torch.zeros(3, 5, dtype=torch.long)))
    assert set(it.rule.cuttable) == {"v", "h", "b0", "b1"} and it.rule.summed == {"v"}


def test_an_id_outside_the_table_raises() -> None:
    it = whole_case("aten.embedding.default", (r(7, 4), torch.tensor([0, 3])))
    it.values[1][1] = 7
    with pytest.raises(RuntimeError, match="outside the table"):
        cut(it, [("v", (1, 1))])


def test_groups_of_ranges() -> None:
    """A cut in several ranges per cell: positions are those of the whole."""
    for it, name in (
        (whole_case("aten.cross_entropy_loss.default", (r(4, 8), torch.randint(0, 8, (4,)))), "c"),
        (whole_case("aten.embedding.default", (r(8, 2), torch.arange(8))), "v"),
        (whole_case("aten.argmax.default", (r(3, 8), 1)), "d1"),
        (whole_case("aten.tril.default", (r(8, 3),)), "d0"),
        (whole_case("aten.masked_scatter.default", (r(8, 3), r(8, 3) > 0, r(24))), "d0"),
    ):
        cut_by(it, (Cut(name, (1, 1), (4, 4), 4),))

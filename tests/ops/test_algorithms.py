"""Every algorithm along every name it may cut: outputs, gradients, roles and collectives, against the op run whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.ops.cells import cut, cut_by, prove_cells, whole_case
from weft.ir.oplayout import Cut


def floats(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        ("aten.mean.default", (), {}),
        ("aten.mean.dim", ((0, -1),), {}),
        ("aten.mean.dim", ((1,), True), {}),
        ("aten.mean.dim", ((1,),), {"dtype": torch.float64}),
        ("aten.var.correction", ((0, 2),), {}),
        ("aten.var.correction", ((1,),), {"correction": 0, "keepdim": True}),
        ("aten.var.default", (), {}),
        ("aten.var.dim", ((1,), False), {}),
        ("aten.std.correction", ((2,),), {"correction": 1}),
        ("aten.var_mean.correction", ((0,),), {}),
        ("aten.std_mean.correction", ((0, 1),), {"keepdim": True}),
        ("aten.softmax.int", (-1,), {}),
        ("aten.softmax.int", (1, torch.float64), {}),
        ("aten._softmax.default", (0, False), {}),
        ("aten.log_softmax.int", (-1,), {}),
        ("aten._log_softmax.default", (1, False), {}),
        ("aten.logsumexp.default", ((0,),), {}),
        ("aten.logsumexp.default", ((1, 2), True), {}),
        ("aten.linalg_vector_norm.default", (2, (1,)), {}),
        ("aten.linalg_vector_norm.default", (3, (0, 2), True), {}),
        ("aten.linalg_vector_norm.default", (1,), {"dtype": torch.float64}),
        ("aten.norm.ScalarOpt_dim", (2, (1,)), {}),
        ("aten.norm.Scalar", (), {}),
        ("aten.amax.default", ((1,),), {}),
        ("aten.amax.default", ((0, 2), True), {}),
        ("aten.amin.default", ((0,),), {}),
        ("aten.max.default", (), {}),
        ("aten.min.default", (), {}),
        ("aten.max.dim", (1,), {}),
        ("aten.min.dim", (2, True), {}),
        ("aten.argmax.default", (1,), {}),
        ("aten.argmax.default", (), {}),
        ("aten.argmin.default", (0, True), {}),
    ],
)
def test_statistics(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    it = prove_cells(whole_case(target, (floats(4, 6, 3), *args), kwargs))
    assert set(it.rule.cuttable) == {"d0", "d1", "d2"}


@pytest.mark.parametrize("target", ["aten.amax.default", "aten.amin.default"])
def test_ties_share_the_gradient(target: str) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    prove_cells(whole_case(target, (x, (1,))))


def test_the_first_of_equals_has_the_index() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    for target in ("aten.max.dim", "aten.min.dim", "aten.argmax.default"):
        prove_cells(whole_case(target, (x, 1)))


def test_extremes_of_whole_numbers() -> None:
    prove_cells(whole_case("aten.amax.default", (torch.randint(-9, 0, (5, 4)), (0,))))


def test_std_of_equal_elements_has_no_gradient() -> None:
    x = torch.ones(2, 4, dtype=torch.float64)
    it = prove_cells(whole_case("aten.std.correction", (x, (1,))))
    assert it.gradients[0] is not None and not it.gradients[0].any()


@pytest.mark.parametrize("order", [0.5, 1, 2, 3])
def test_norms_of_zeros_have_no_gradient(order: float) -> None:
    x = floats(3, 4)
    x[0] = 0
    x[1, 2] = 0
    prove_cells(whole_case("aten.linalg_vector_norm.default", (x, order, (1,))), ["d1"])


def test_the_largest_norm_is_not_cut_along() -> None:
    it = prove_cells(whole_case("aten.linalg_vector_norm.default", (floats(4, 6), math.inf, (1,))))
    assert it.rule.cuttable == ("d0",)


def test_softmax_of_masked_and_large_scores() -> None:
    x = floats(3, 6) * 400
    x[:, 1:3] = -torch.inf
    for target in ("aten.softmax.int", "aten.log_softmax.int"):
        prove_cells(whole_case(target, (x, 1)), ["d1"])
    x[0] = -torch.inf
    prove_cells(whole_case("aten.logsumexp.default", (x[:1], (1,))))


@pytest.mark.parametrize("affine", ["both", "weight", "none"])
@pytest.mark.parametrize("num_dims", [1, 2])
def test_layer_norm(affine: str, num_dims: int) -> None:
    shape = (4, 6)[2 - num_dims :]
    weight = floats(*shape) if affine != "none" else None
    bias = floats(*shape) if affine == "both" else None
    it = prove_cells(whole_case("aten.layer_norm.default", (floats(3, 4, 6), shape, weight, bias, 1e-3)))
    assert set(it.rule.algorithms) == {f"n{i}" for i in range(num_dims)}
    assert len(it.rule.cuttable) == 3


def test_native_layer_norm() -> None:
    x, shape = floats(3, 4, 6), (6,)
    it = whole_case("aten.native_layer_norm.default", (x, shape, floats(6), floats(6), 1e-5))
    # the statistics are for backward alone
    zeros = tuple(c if i == 0 else torch.zeros_like(c) for i, c in enumerate(it.cotangents))
    leaves = [v.clone().requires_grad_() for v in it.values]
    torch.nn.functional.layer_norm(leaves[0], shape, leaves[1], leaves[2]).backward(zeros[0])
    gradients = tuple(leaf.grad for leaf in leaves)
    prove_cells(type(it)(it.op, it.graph, it.rule, it.values, it.results, zeros, gradients))


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(eps: float | None, weighted: bool) -> None:
    weight = floats(4, 6) if weighted else None
    prove_cells(whole_case("aten.rms_norm.default", (floats(3, 4, 6), (4, 6), weight, eps)))


def test_group_norm() -> None:
    args = (floats(3, 8, 4), 4, floats(8), floats(8), 1e-5)
    it = prove_cells(whole_case("aten.group_norm.default", args))
    assert set(it.rule.cuttable) == {"n", "g", "c", "s0"}
    assert set(it.rule.algorithms) == {"c", "s0"}
    prove_cells(whole_case("aten.group_norm.default", (floats(2, 4), 2)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(5, 4), (4, 4, 3, 2)])
def test_batch_norm(training: bool, shape: tuple[int, ...]) -> None:
    running = [torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
    args = (floats(*shape), floats(4), floats(4), *running, training, 0.1, 1e-5, False)
    it = prove_cells(whole_case("aten.batch_norm.default", args, fixed=(3, 4)))
    assert ("n" in it.rule.algorithms) is training


def test_batch_norm_leaves_its_running_statistics_alone() -> None:
    args = (floats(4, 6), None, None, torch.zeros(6).double(), torch.ones(6).double(), True, 0.1, 1e-5, False)
    it = whole_case("aten.batch_norm.default", args, fixed=(1, 2))
    before = [value.clone() for value in it.values]
    cut(it, [("c", (1, 1))])
    assert all(map(torch.equal, it.values, before))


def test_instance_norm() -> None:
    args = (floats(3, 4, 5), floats(4), floats(4), None, None, True, 0.1, 1e-5, False)
    prove_cells(whole_case("aten.instance_norm.default", args))


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_rows(reduction: int, smoothing: float, weighted: bool) -> None:
    target = torch.randint(0, 6, (7,))
    target[[1, 4]] = -100
    weight = torch.rand(6, dtype=torch.float64) if weighted else None
    args = (floats(7, 6), target, weight, reduction, -100, smoothing)
    it = prove_cells(whole_case("aten.cross_entropy_loss.default", args, fixed=(2,) * weighted))
    assert set(it.rule.cuttable) == {"n", "c"}


def test_cross_entropy_ignores_a_class() -> None:
    target = torch.randint(0, 4, (6,))
    target[2] = 3
    prove_cells(whole_case("aten.cross_entropy_loss.default", (floats(6, 4), target, None, 1, 3, 0.1)))


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_cross_entropy_with_spatial_dims(reduction: int) -> None:
    target = torch.randint(0, 5, (3, 4, 2))
    target[0, 1] = -100
    weight = torch.rand(5, dtype=torch.float64)
    args = (floats(3, 5, 4, 2), target, weight, reduction, -100, 0.1)
    prove_cells(whole_case("aten.cross_entropy_loss.default", args, fixed=(2,)))
    prove_cells(whole_case("aten.cross_entropy_loss.default", (*args[:2], None, reduction)))


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_cross_entropy_of_one_row(reduction: int) -> None:
    prove_cells(whole_case("aten.cross_entropy_loss.default", (floats(6), torch.tensor(4), None, reduction)))


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shape", [(5, 6), (3, 4, 2), (6,)])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_with_probabilities(reduction: int, shape: tuple[int, ...], smoothing: float) -> None:
    num_classes = shape[0] if len(shape) == 1 else shape[1]
    target = floats(*shape).softmax(0)
    weight = torch.rand(num_classes, dtype=torch.float64) if reduction else None
    args = (floats(*shape), target, weight, reduction, -100, smoothing)
    prove_cells(whole_case("aten.cross_entropy_loss.default", args))


def test_cross_entropy_of_large_scores() -> None:
    prove_cells(whole_case("aten.cross_entropy_loss.default", (floats(4, 6) * 1e3, torch.randint(0, 6, (4,)))))


def test_a_target_outside_the_classes_raises() -> None:
    it = whole_case("aten.cross_entropy_loss.default", (floats(4, 6), torch.tensor([0, 1, 2, 3])))
    it.values[1][2] = 6
    with pytest.raises(RuntimeError, match="neither a class"):
        cut(it, [("c", (1, 1))])


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("target", ["aten.nll_loss_nd.default", "aten.nll_loss.default"])
def test_nll_loss(reduction: int, target: str) -> None:
    aim = torch.randint(0, 6, (7,))
    aim[3] = 2
    for weight in (None, torch.rand(6, dtype=torch.float64)):
        args = (floats(7, 6).log_softmax(1), aim, weight, reduction, 2)
        prove_cells(whole_case(target, args, fixed=(2,) * (weight is not None)))


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_nll_loss_with_spatial_dims(reduction: int) -> None:
    args = (floats(3, 5, 4, 2), torch.randint(0, 5, (3, 4, 2)), None, reduction)
    prove_cells(whole_case("aten.nll_loss_nd.default", args))


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(
    ("target", "more"),
    [
        ("aten.mse_loss.default", ()),
        ("aten.l1_loss.default", ()),
        ("aten.smooth_l1_loss.default", (0.5,)),
        ("aten.huber_loss.default", (0.7,)),
    ],
)
def test_pointwise_losses(target: str, more: tuple[Any, ...], reduction: int) -> None:
    prove_cells(whole_case(target, (floats(4, 6), floats(4, 6), reduction, *more)))


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_pointwise_losses_with_other_arguments(reduction: int) -> None:
    signs = floats(4, 6).sign()
    prove_cells(whole_case("aten.soft_margin_loss.default", (floats(4, 6), signs, reduction), fixed=(1,)))
    prove_cells(whole_case("aten.hinge_embedding_loss.default", (floats(4, 6), signs, 0.3, reduction), fixed=(1,)))
    args = (floats(4, 6), floats(4, 6), signs)
    prove_cells(whole_case("aten.margin_ranking_loss.default", args, {"reduction": reduction}, fixed=(2,)))
    args = (floats(4, 6), floats(4, 6).exp(), True, True, 1e-8, reduction)
    prove_cells(whole_case("aten.poisson_nll_loss.default", args, fixed=(1,)))


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_binary_cross_entropy(reduction: int) -> None:
    x, y, weight = floats(4, 6), torch.rand(4, 6).double(), torch.rand(6).double()
    prove_cells(whole_case("aten.binary_cross_entropy.default", (x.sigmoid(), y, None, reduction)))
    args = (x.sigmoid(), y, weight, reduction)
    prove_cells(whole_case("aten.binary_cross_entropy.default", args, fixed=(2,)))
    name = "aten.binary_cross_entropy_with_logits.default"
    prove_cells(whole_case(name, (x, y, None, None, reduction)))
    prove_cells(whole_case(name, (x, y, weight, torch.rand(4, 1).double() + 1, reduction), fixed=(2, 3)))


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div(reduction: int, log_target: bool) -> None:
    target = floats(4, 6).log_softmax(1) if log_target else floats(4, 6).softmax(1)
    args = (floats(4, 6).log_softmax(1), target, reduction)
    prove_cells(whole_case("aten.kl_div.default", args, {"log_target": log_target}))


@pytest.mark.parametrize("padding", [-1, 2])
def test_embedding(padding: int) -> None:
    ids = torch.randint(0, 7, (3, 5))
    ids[0, :2] = 2
    it = prove_cells(whole_case("aten.embedding.default", (floats(7, 4), ids, padding)))
    assert set(it.rule.cuttable) == {"v", "h", "b0", "b1"} and it.rule.summed == {"v"}
    prove_cells(whole_case("aten.embedding.default", (floats(7, 4), ids, padding, True)))


def test_an_id_outside_the_table_raises() -> None:
    it = whole_case("aten.embedding.default", (floats(7, 4), torch.tensor([0, 3])))
    it.values[1][1] = 7
    with pytest.raises(RuntimeError, match="outside the table"):
        cut(it, [("v", (1, 1))])


def test_groups_of_ranges() -> None:
    """A cut in several ranges per cell: positions are those of the whole."""
    for it, name in (
        (whole_case("aten.cross_entropy_loss.default", (floats(4, 8), torch.randint(0, 8, (4,)))), "c"),
        (whole_case("aten.embedding.default", (floats(8, 2), torch.arange(8))), "v"),
        (whole_case("aten.argmax.default", (floats(3, 8), 1)), "d1"),
    ):
        cut_by(it, (Cut(name, (1, 1), (4, 4), 4),))

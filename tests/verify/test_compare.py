"""The difference of two tensors, and the verdict."""

from __future__ import annotations

import json
import math

import pytest
import torch

from weft.verify.compare import LARGEST, Difference, FirstDifference, Result, Sample, compare, compare_kind, difference


def test_difference_is_relative_to_the_reference() -> None:
    assert difference(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0])) == 0.25
    assert difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])) == 0.2
    assert difference(torch.zeros(0), torch.zeros(0)) == 0.0


def test_a_vanishing_tensor_is_compared_with_the_scale_of_its_kind() -> None:
    ours = {"weight": torch.ones(4, dtype=torch.float64), "bias": torch.full((4,), 1e-19, dtype=torch.float64)}
    reference = {"weight": torch.ones(4, dtype=torch.float64), "bias": torch.full((4,), 2e-20, dtype=torch.float64)}
    found = compare_kind("gradients", ours, reference)
    assert found.tensor == "bias"
    assert found.value == pytest.approx(8e-20 / math.sqrt(0.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_close(bad: float) -> None:
    assert difference(torch.tensor([bad]), torch.tensor([1.0])) == LARGEST
    assert difference(torch.tensor([1.0]), torch.tensor([bad])) == LARGEST


def test_the_same_infinity_is_equal_but_nan_never_is() -> None:
    mask = torch.tensor([0.0, -math.inf])
    assert difference(mask, mask) == 0.0
    assert difference(torch.tensor([0.5, -math.inf]), torch.tensor([1.0, -math.inf])) == 0.5
    assert difference(torch.tensor([math.nan]), torch.tensor([math.nan])) == LARGEST


def test_shapes_must_agree() -> None:
    assert difference(torch.ones(2, 1), torch.ones(2)) == LARGEST


def test_an_absent_gradient_is_zero_and_a_wrong_counter_is_seen() -> None:
    assert compare_kind("gradients", {}, {"a": torch.zeros(2)}).value == 0.0
    assert compare_kind("gradients", {}, {"a": torch.ones(2)}).value == 1.0
    assert compare_kind("gradients", {"a": torch.ones(2)}, {}).value == LARGEST
    big = torch.full((3,), 1e6)
    counters = compare_kind("weights", {"w": big, "n": torch.tensor(3)}, {"w": big, "n": torch.tensor(2)})
    assert (counters.tensor, counters.value) == ("n", 0.5)


def sample(loss: float, gradient: float, weight: float) -> Sample:
    gradients = {"w": torch.tensor([gradient, 1.0], dtype=torch.float64)}
    losses = (torch.tensor(1.0), torch.tensor(loss))
    return Sample(losses, ({"w": torch.ones(2)}, gradients), {"w": torch.tensor([weight, 1.0])})


def test_each_kind_has_its_largest_difference() -> None:
    found = compare(sample(1.5, 1.25, 1.0), sample(1.0, 1.0, 1.0))
    assert [(d.kind, d.value, d.tensor) for d in found] == [
        ("loss", 0.5, "loss of step 2"),
        ("gradients", 0.25, "w"),
        ("weights", 0.0, "w"),
    ]


def test_result_is_valid_json() -> None:
    first = FirstDifference("h.0/linear", "linear", "model.py:3", LARGEST)
    result = Result(False, LARGEST, (Difference("loss", LARGEST, "loss"),), 1e-9, 2, first)
    said = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert said["equal"] is False and said["largest_difference"] == "infinite"
    assert said["first_difference"]["source"] == "model.py:3"
    assert not result and "operator h.0/linear" in str(result) and "infinite" in str(result)

"""What losses of micro-batches count."""

from __future__ import annotations

import math

import pytest
import torch

from weft.runtime.training.microbatches import part_sizes, split_arguments
from weft.runtime.training.reduction import BadReduction, Reduction, per_token, reduced

MICROS = [((), {"x": torch.zeros(2), "labels": torch.tensor([[1, -100], [2, 3]])}), ((), {"labels": torch.zeros(1, 2)})]


def test_means_count_by_rows_and_sums_one_each() -> None:
    mean, total = Reduction(), Reduction("sum")
    assert mean.weights(MICROS, [2, 1]) == [2, 1] and mean.shares([2, 1]) == pytest.approx([2 / 3, 1 / 3])
    assert total.shares(total.weights(MICROS, [2, 1])) == [1, 1]
    assert split_arguments((torch.zeros(5),), {}, None, 2)[1] == mean.shares([float(rows) for rows in part_sizes(5, 2)])


def test_tokens_are_counted() -> None:
    assert Reduction(per_token("labels")).weights(MICROS, [2, 1]) == [3, 2]
    assert Reduction(per_token("labels", ignore_index=0, shift=1)).weights(MICROS, [2, 1]) == [2, 0]
    assert per_token(1)(torch.zeros(2), torch.tensor([5, -100])) == 1


def test_replicas_are_averaged_after_counting() -> None:
    """Two replicas, of weights 3 and 1: the mean of their sums is the mean over all."""
    mean = Reduction()
    mine, theirs = mean.counts([2, 1], [3, 1]), mean.counts([1], [3, 1])
    assert [count / 2 for count in (*mine, *theirs)] == pytest.approx([2 / 4, 1 / 4, 1 / 4])
    assert Reduction("sum").counts([1, 1], [2, 1]) == [2, 2]
    assert all(map(math.isnan, mean.counts([0.0], [0.0])))


def test_what_weighs_nothing_is_not_looked_at() -> None:
    losses = [torch.tensor(2.0), torch.tensor(math.nan)]
    assert reduced(losses, [1.0, 0.0]).item() == 2
    assert math.isnan(reduced(losses, [0.5, 0.5]).item())


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "many", torch.zeros(2)])
def test_what_is_no_weight_is_refused(weight: object) -> None:
    with pytest.raises(BadReduction, match="weighs"):
        Reduction(lambda **batch: weight).weights(MICROS, [2, 1])


def test_what_is_no_reduction_is_refused() -> None:
    with pytest.raises(BadReduction, match="no reduction"):
        Reduction("median")  # type: ignore[arg-type]
    with pytest.raises(BadReduction, match="it has x, labels"):
        per_token("targets")(**MICROS[0][1])

"""Embedding bags: both forms of input, captured as ops with one result, and the numbers they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.capture.compare import assert_same
from weft.capture import capture
from weft.compile.subject import check_dense
from weft.errors import ModelFileError


class Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(9, 4, **options)

    def forward(self, ids: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if len(rest) == 2:
            return self.bags(ids, rest[0], per_sample_weights=rest[1]).sum()
        if rest and rest[0].is_floating_point():
            return self.bags(ids, per_sample_weights=rest[0]).sum()
        return self.bags(ids, *rest).sum()


IDS = torch.randint(9, (3, 5), generator=torch.Generator().manual_seed(0))
OFFSETS = torch.tensor([0, 4, 4, 9])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2, -1])
def test_rows_of_ids(mode: str, padding: int | None) -> None:
    module = Bags(mode=mode, padding_idx=padding)
    assert_same(module, (IDS,))
    (bag,) = (op for op in capture(module, (IDS,)).ops if op.kind == "embedding_bag")
    # neither flattened nor with offsets: bags are a dim of the ids
    assert bag.inputs[1] == "ids" and len(bag.inputs) == 2


def test_weights_keep_the_shape_of_the_ids() -> None:
    module = Bags(mode="sum")
    assert_same(module, (IDS, torch.rand(3, 5)))
    assert [op.kind for op in capture(module, (IDS, torch.rand(3, 5))).ops] == ["embedding_bag", "sum"]


@pytest.mark.parametrize("last", [False, True])
def test_offsets(last: bool) -> None:
    flat = IDS.reshape(-1)
    assert_same(Bags(mode="mean", include_last_offset=last), (flat, OFFSETS))
    assert_same(Bags(mode="sum", include_last_offset=last, padding_idx=3), (flat, OFFSETS, torch.rand(15)))


def test_a_sparse_gradient_is_refused() -> None:
    with pytest.raises(ModelFileError, match="sparse"):
        check_dense(capture(Bags(mode="sum", sparse=True), (IDS,)))

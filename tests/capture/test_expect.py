"""Branches on values that can go one way only while all is well: answered in the trace, checked in every step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

from tests.capture.compare import assert_same
from tests.graph_interpreter import run_graph
from weft.capture import capture
from weft.errors import CaptureError

LIMIT = 9


class Checked(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "raise" and x is not None and x.max() >= LIMIT:
            raise ValueError("too large")
        if self.kind == "assert":
            assert (x < LIMIT).all(), "too large"
        if self.kind == "item":
            assert x.max().item() < LIMIT
        if self.kind == "not" and not (x < LIMIT).all():
            raise ValueError("too large")
        if self.kind == "finite" and not torch.isfinite(x).all():
            x = x.clamp(-5, 5)
        if self.kind == "nan" and (torch.isnan(x).any() or torch.isinf(x).any()):
            x = x.clamp(-5, 5)
        if self.kind == "distribution":
            return Normal(x, self.scale).log_prob(torch.zeros(())).sum()
        return (x * self.scale).sum()


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() >= LIMIT:
            return x.sum()
        return x.mean()


@pytest.mark.parametrize("kind", ["raise", "assert", "item", "not", "finite", "nan", "distribution"])
def test_the_healthy_branch_is_captured_and_checked(kind: str) -> None:
    module, x = Checked(kind), torch.arange(4.0)
    graph = capture(module, x)
    assert graph.ops[-1].target == "weft.expect"
    assert graph.loss is not None
    assert run_graph(graph, module, x)[graph.loss] == module(x)
    # all there is to say of the mean of a normal distribution is that it is a number
    bad = torch.tensor([0.0, 1.0, float("nan" if kind == "distribution" else "inf"), 2.0])
    with pytest.raises(RuntimeError, match=r"\.py:\d+ .* in this step"):
        run_graph(graph, module, bad)


def test_another_branch_on_values_is_refused() -> None:
    with pytest.raises(CaptureError, match="depends on the values"):
        capture(Branches(), torch.arange(4.0))


class Aligned(nn.Module):
    """A ctc loss whose targets are laid end to end, those below zero left out."""

    def __init__(self, *, reads: bool = False, wrong: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)
        self.reads, self.wrong = reads, wrong

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        kept = labels >= 0
        flat = labels.masked_select(kept)
        if self.reads:
            return self.head(x).sum() * flat.sum()
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        lengths = kept.sum(1).flip(0) if self.wrong else kept.sum(1)
        steps = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
        return F.ctc_loss(scores, flat, steps, lengths)


LABELS = torch.tensor([[1, -100, 2, 3], [4, 5, -100, -100], [1, 1, 2, 5]])


def test_targets_of_a_ctc_loss_may_be_selected_by_a_mask() -> None:
    torch.manual_seed(0)
    assert_same(Aligned(), (torch.randn(3, 12, 4), LABELS))


def test_lengths_that_are_not_the_masks_are_found_in_the_step() -> None:
    module, x = Aligned(wrong=True), torch.randn(3, 12, 4)
    graph = capture(module, (x, LABELS))
    with pytest.raises(RuntimeError, match="in this step"):
        run_graph(graph, module, (x, LABELS))


def test_other_readers_of_a_selection_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"masked_select.*aten\.sum"):
        capture(Aligned(reads=True), (torch.randn(3, 12, 4), LABELS))

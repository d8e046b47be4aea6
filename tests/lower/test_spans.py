"""Estimated times of pieces: what a device does, backward twice the forward, what is run again counted again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.capture import capture
from weft.ir.graph import Graph
from weft.lower.pipeline import lower_pieces
from weft.lower.spans import spans_of
from weft.ops.book import RuleBook
from weft.ops.work import work_of
from weft.order import Span
from weft.plan.load import load_plan

WIDTH = 32


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(Tower(), (torch.randn(64, WIDTH),))


def spans(graph: Graph, plan: str) -> list[Span]:
    return list(spans_of(lower_pieces(load_plan(plan, graph))).values())


def test_backward_is_twice_forward_and_weights_are_those_of_linears(graph: Graph) -> None:
    book = RuleBook(graph)
    times = {op.name: work_of(op, book.rule(op), graph).time for op in graph.ops}
    found = spans(graph, "pp=2,microbatches=1")
    assert sum(one.f for one in found) == pytest.approx(sum(times.values()))
    assert all(one.b + one.w == pytest.approx(2 * one.f) for one in found)
    linears = sum(times[op.name] for op in graph.ops if op.kind == "linear")
    assert sum(one.w for one in found) == pytest.approx(linears)


def test_what_is_run_again_counts_again(graph: Graph) -> None:
    plain, again = spans(graph, "pp=2,microbatches=1"), spans(graph, "pp=2,microbatches=1,recompute=layers.*")
    for one, other in zip(plain, again, strict=True):
        assert other.f == one.f and other.w == one.w and one.b < other.b <= one.b + one.f


def test_a_device_does_its_part(graph: Graph) -> None:
    whole, parts = spans(graph, "pp=2,microbatches=1"), spans(graph, "pp=2,dp=2,microbatches=1")
    for one, other in zip(whole, parts, strict=True):
        assert other.f == pytest.approx(one.f / 2)

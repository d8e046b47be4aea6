"""What is said about a plan: nothing is replicated in silence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from weft.commands.verify import show_result
from weft.lower.check import Report
from weft.plan import Plan, cut


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.linalg.matrix_exp(self.middle(torch.relu(self.up(x)))[:8])
        return (self.down(hidden) + torch.arange(6)).square().mean()


def said(plan, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict]:
    torch.manual_seed(0)
    result = weft.verify(Net(), (torch.randn(8, 6),), plan=plan)
    assert result.equal, str(result)
    show_result(result, title="net")
    return capsys.readouterr().out, result.as_json()


def test_what_runs_whole_is_named_heavy_first(capsys: pytest.CaptureFixture[str]) -> None:
    out, told = said(lambda graph: Plan(graph, 2).trans("up", cut("n", 2, axis="tp")), capsys)
    assert "tp=2 cuts" in out and "all=2" not in out and "all" not in told["axes"]
    assert "runs whole on every device:\n" in out and "arange" not in out
    linear = next(line for line in out.splitlines() if line.startswith(("  2 linear", "  1 linear")))
    assert "/linear; test_summary.py:" in linear
    assert "warning: linalg_matrix_exp has nothing to cut: it runs copied on every device: " in out
    assert "% of the work (linalg_matrix_exp; test_summary.py:" in out
    assert told["whole"][0]["kind"] == "linear"
    assert {"kind", "count", "first", "source", "reason"} <= told["whole"][0].keys()
    assert out.count("warning") == 1 and "linalg_matrix_exp" in told["warnings"][0]


def test_a_plan_that_cuts_nothing_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    out, told = said(lambda graph: Plan(graph, 2), capsys)
    assert "warning: this plan cuts nothing: all 2 devices do the same work" in out
    assert told["axes"] == {} and "3 linear" in out


def test_one_device_runs_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    out, told = said(lambda graph: Plan(graph, 1), capsys)
    assert "whole" not in out and "warning" not in out and told["whole"] == []


def test_numbers_of_one() -> None:
    assert str(Report(1, 1, 1, 1, 1)) == (
        "1 operand exact, 1 sum complete, 1 collective matched, 1 gradient and 1 parameter gradient complete"
    )
    assert "2 collectives matched, 0 gradients" in str(Report(2, 2, 2, 0, 2))


def test_what_is_printed_in_python_warns_too() -> None:
    torch.manual_seed(0)
    result = weft.verify(Net(), (torch.randn(8, 6),), plan=lambda graph: Plan(graph, 2).trans("up", cut("n", 2)))
    assert "warning: linalg_matrix_exp" in str(result)

"""`weft ops`: every operator, its share of the work, its rule; what has none is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from weft.capture import capture
from weft.cli import main
from weft.ops.coverage import coverage, unruled_warnings

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")

FILE = """
import torch
from torch import nn

print("importing")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return torch.linalg.matrix_exp(self.up(x)).square().mean()

def model():
    return Net()

def example():
    return (torch.randn(8, 8),)
"""


class Counted(nn.Module):
    """Work that is known by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3, groups=1, bias=False), nn.Linear(4, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).flatten(2).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(y, y, y)
        return torch.cat([self.linear(y)] * 2).sum()


def test_work_is_counted_as_by_hand() -> None:
    found = {kind.operator: kind for kind in coverage(capture(Counted(), (torch.randn(2, 3, 6, 6),))).kinds}
    assert found["conv2d"].work.flops == 2 * (2 * 4 * 4 * 4) * (3 * 3 * 3)
    assert found["linear"].work.flops == 2 * 2 * 16 * 4 * 5
    assert found["scaled_dot_product_attention"].work.flops == 2 * (2 * 16) * 16 * (4 + 4)
    assert found["transpose"].work.bytes == 0 and found["flatten"].work.bytes == 0
    assert found["cat"].work.flops == 0 and found["cat"].work.bytes == 4 * (2 * 16 * 5) * 3
    assert sum(kind.flops_share for kind in found.values()) == pytest.approx(1)


def test_the_table_and_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", GPT]) == 0
    out = capsys.readouterr().out
    linear = next(line for line in out.splitlines() if line.strip().startswith("linear"))
    assert "k+, n k+, &n -> " in linear and "table" in linear and "92%" in linear
    assert "52 of 52 operators have a rule: 100% of the floating-point work, 100% of the memory traffic" in out
    assert "warning" not in out


def test_what_has_no_rule_is_told_with_its_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.py"
    file.write_text(FILE)
    assert main(["ops", str(file), "--json"]) == 0
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert "importing" in captured.err
    (odd,) = (kind for kind in said["kinds"] if kind["source"] == "none")
    assert odd["operator"] == "linalg_matrix_exp" and odd["rule"] is None and odd["line"] == "net.py:13"
    assert 0 < odd["flops_share"] < 1 and said["flops_share"] == pytest.approx(1 - odd["flops_share"])
    assert said["with_rule"] == said["operators"] - 1
    assert "runs copied on every device: " in odd["means"] and "of the work" in odd["means"]
    assert len(said["warnings"]) == 1 and "linalg_matrix_exp has no rule" in said["warnings"][0]
    assert main(["ops", str(file)]) == 0
    assert "warning: linalg_matrix_exp has no rule: it runs copied on every device" in capsys.readouterr().out


def test_what_is_constant_is_not_warned_of() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale + torch.linalg.matrix_exp(torch.eye(4))).sum()

    assert unruled_warnings(coverage(capture(Net(), (torch.randn(4, 4),))).kinds) == []

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
from weft.plan import Plan, copy, cut
from weft.plan.divided import divided
from weft.plan.recipes.text import parse_recipe

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
        return nn.functional.pdist(self.up(x)).square().mean()

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


def test_the_table_and_the_summary(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
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
    assert odd["operator"] == "pdist" and odd["rule"] is None and odd["line"] == "net.py:13"
    assert 0 < odd["flops_share"] < 1 and said["flops_share"] == pytest.approx(1 - odd["flops_share"])
    assert said["with_rule"] == said["operators"] - 1
    assert "runs copied on every device: " in odd["means"] and "of the work" in odd["means"]
    assert len(said["warnings"]) == 1 and "pdist has no rule" in said["warnings"][0]
    assert main(["ops", str(file)]) == 0
    assert "warning: pdist has no rule: it runs copied on every device" in capsys.readouterr().out


def test_what_is_constant_is_not_warned_of() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale + torch.linalg.matrix_exp(torch.eye(4))).sum()

    assert unruled_warnings(coverage(capture(Net(), (torch.randn(4, 4),))).kinds) == []


class Twice(nn.Module):
    """Two linear layers: 2 * 8 * 4 * 12 multiplications and additions each, and little else."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 12, bias=False), nn.Linear(12, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.up(x).relu())
        return hidden.sum()


LINEAR, RELU, SUM = 2 * 8 * 4 * 12, 8 * 12, 8 * 4
ALL = 2 * LINEAR + RELU + SUM


def shares(recipe: str) -> tuple[float, dict[str, float]]:
    plan = parse_recipe(recipe)
    found = divided(plan.write(Plan(capture(Twice(), (torch.randn(8, 4),)), plan.devices)))
    return found.flops_share, {one.op: one.flops_share for one in found.rest}


@pytest.mark.parametrize("recipe", ["tp=2", "tp=3"])
def test_what_a_plan_cuts_is_counted_as_by_hand(recipe: str) -> None:
    share, rest = shares(recipe)
    assert share == pytest.approx(1 - SUM / ALL) and rest == {"sum": pytest.approx(SUM / ALL)}


def test_what_one_of_two_axes_cuts_counts_by_how_often_it_is_done() -> None:
    # the sum is cut along the batch, and then done by two of four devices each: two thirds of what could be saved
    share, rest = shares("dp=2,tp=2")
    assert share == pytest.approx(1 - SUM / ALL / 3) and list(rest) == ["sum"]


def test_chunks_on_one_device_are_not_cut() -> None:
    assert shares("coshard=2")[0] == 0
    share, rest = shares("dp=2,coshard=2")
    assert share == 1 and not rest


def test_addends_are_work_of_full_size() -> None:
    graph = capture(Twice(), (torch.randn(8, 4),))
    plan = Plan(graph, 2).trans("down/linear", cut("k", 2, "tp")).trans("up/linear", copy(2, "tp"))
    found = {one.op: one for one in divided(plan).rest}
    assert found["up/linear"].why.startswith("left whole; may be cut along") and "down/linear" not in found
    assert found["sum"].why == "every device has addends of full size"


def test_the_share_that_a_plan_cuts_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", GPT, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["cut"]
    assert said["plan"] == "tp=2" and 0.95 < said["flops_share"] < 1 and 0 < said["bytes_share"] < 1
    assert said["flops_share"] == pytest.approx(1 - sum(one["flops_share"] for one in said["rest"]))
    weights = [one["flops_share"] for one in said["rest"]]
    assert weights == sorted(weights, reverse=True)
    (norm,) = (one for one in said["rest"] if one["op"] == "norm/layer_norm")
    assert norm["operator"] == "layer_norm" and norm["line"].startswith("gpt.py:") and norm["why"]
    assert main(["ops", GPT, "--plan", "dp=2"]) == 0
    out = capsys.readouterr().out
    assert "under dp=2: 100% of the floating-point work is cut" in out


def test_layers_share_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", GPT]) == 0
    out = capsys.readouterr().out
    assert "under tp=2: 99.2% of the floating-point work is cut, " in out
    assert "blocks.*.norm1/layer_norm (2 times), gpt.py:" in out and "blocks.1" not in out.split("under tp=2")[1]


def test_a_plan_that_finds_nothing_to_cut_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.py"
    file.write_text(FILE.replace("nn.Linear(8, 8)", "nn.LayerNorm(8)"))
    assert main(["ops", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["cut"]
    assert said["flops_share"] == 0 and "no inner dim" in said["error"]
    assert main(["ops", str(file)]) == 0
    assert "under tp=2: no such plan: tp=2: " in capsys.readouterr().out
    assert main(["ops", str(file), "--plan", "tq=2"]) == 2


def test_verify_and_ops_give_the_same_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.py"
    file.write_text(FILE)
    assert main(["ops", str(file)]) == 0
    (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: "))
    assert main(["verify", str(file), "--plan", "tp=2"]) == 0
    assert capsys.readouterr().out.count(told) == 1
    assert main(["train", str(file), "--plan", "tp=2", "--steps", "1"]) == 0
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count(told) == 1


def test_what_has_a_rule_but_nothing_to_cut_is_told() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(self.scale).sum() * x.sum()

    (told,) = unruled_warnings(coverage(capture(Net(), (torch.randn(4, 4),))).kinds)
    assert told.startswith("linalg_matrix_exp has n") and ": it runs copied on every device: 4" in told

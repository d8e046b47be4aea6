"""Verification in another precision: the program is proven in float64, then judged by its rounding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from tests.acceptance.subjects import gpt, llama, mlp
from weft.capture import capture
from weft.capture.precision import Precision
from weft.cli import main
from weft.compile.model_file import load_model_file
from weft.compile.subject import in_precision
from weft.errors import ModelFileError
from weft.verify.compare import Sample
from weft.verify.reference import run_reference
from weft.verify.rounded import judge_rounding

BF16 = torch.bfloat16
EXAMPLES = Path(__file__).parents[2] / "examples"
PLANS = ("dp=2", "tp=2", "dp=2,tp=2,zero=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2,microbatches=4")
ALWAYS = {("llama", "dp=2,tp=2,zero=2"), ("moe", "dp=2,zero=3")}
MODELS = {
    "gpt": lambda: gpt(tied=True),
    "llama": llama,
    "moe": lambda: load_model_file(EXAMPLES / "moe.py"),
}
CASES = [
    pytest.param(name, plan, marks=() if (name, plan) in ALWAYS else pytest.mark.full)
    for name in MODELS
    for plan in PLANS
]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_plan_rounds_as_one_device_does(name: str, plan: str) -> None:
    subject = MODELS[name]()
    result = weft.verify(subject.model, subject.example, plan=plan, precision="bf16")
    assert result.equal, str(result)
    assert result.largest_difference < 1e-9
    assert result.rounded is not None and not result.rounded.wrong
    # it did compute in bfloat16
    assert result.rounded.ours[1].value > 1e-4 < result.rounded.one[1].value


def test_a_wrong_sum_is_noticed() -> None:
    subject = in_precision(mlp(), "bf16")
    truth = run_reference(subject, seed=0, wide=True)
    one = run_reference(subject, seed=0, wide=False)
    assert subject.precision is not None
    assert not judge_rounding(one, one, truth, subject.precision).wrong
    first = next(iter(one.gradients[0]))
    for change in (lambda x: x * 0.5, lambda x: x * torch.nan, torch.zeros_like):
        spoiled = {**one.gradients[0], first: change(one.gradients[0][first])}
        wrong = replace(one, gradients=(spoiled, *one.gradients[1:]))
        assert judge_rounding(wrong, one, truth, subject.precision).wrong == (f"gradients {first} in step 1",)
    lacks = Sample(one.losses, ({}, *one.gradients[1:]), one.weights)
    assert len(judge_rounding(lacks, one, truth, subject.precision).wrong) == len(one.gradients[0])


class Mixture(nn.Module):
    """A buffer in float32 in a product, batch norm, a float mask, an autocast region, a loss of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("mask", torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e4))
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.scale = nn.LayerNorm(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.up(x) @ self.turn
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, h, h, attn_mask=self.mask)
        h = self.scale(h + self.turn[:6])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.down(h)
        return F.mse_loss(h, y) + F.smooth_l1_loss(h, y) + F.kl_div(h.log_softmax(-1), y.softmax(-1), reduction="sum")


def mixture() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(2)
    x, y = (torch.randn(4, 6, 8, generator=draw) for _ in range(2))
    return Mixture(), (x, y)


@pytest.mark.parametrize("precision", [Precision(BF16), Precision(torch.float16, keep=("norm.*",))])
def test_float32_buffers_norms_and_autocast_regions(precision: Precision) -> None:
    module, example = mixture()
    graph = capture(module, example, precision=precision)
    inside = [op for op in graph.ops if op.autocast is not None and op.kind == "linear"]
    assert [op.path for op in inside] == ["down"]
    assert graph.tensors[inside[0].outputs[0]].dtype == BF16
    losses = [op for op in graph.ops if "loss" in op.kind or op.kind == "kl_div"]
    assert len(losses) == 3
    assert all(graph.tensors[op.outputs[0]].dtype == torch.float32 for op in losses)
    assert {graph.tensors[one.tensor].dtype for one in graph.inputs} == {torch.float32}
    result = weft.verify(module, example, plan="dp=2", precision=precision)
    assert result.equal, str(result)


def test_capture_leaves_the_module_as_it_was() -> None:
    module, example = mixture()
    before = {name: (id(one), one.dtype) for name, one in module.named_parameters()}
    capture(module, example, precision=Precision(BF16))
    assert {name: (id(one), one.dtype) for name, one in module.named_parameters()} == before


FILE = """
import torch
from torch import nn
import weft


def model():
    torch.manual_seed(0)
    return Net()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return (self.two(self.one(x).relu()) ** 2).float().mean()


def example():
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def precision():
    return {precision}
"""


def test_a_model_file_names_its_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.py"
    path.write_text(FILE.replace("{precision}", "weft.Precision(torch.bfloat16, keep=('two.*',))"))
    subject = load_model_file(path)
    assert subject.precision == Precision(BF16, keep=("two.*",))
    assert main(["verify", str(path), "--plan", "dp=2", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["equal"] and told["mixed"]["precision"] == "bfloat16" and not told["mixed"]["wrong"]
    assert main(["verify", str(path), "--plan", "dp=2", "--precision", "fp16"]) == 0
    assert "in float16, from float64: loss" in capsys.readouterr().out


def test_a_program_in_another_precision_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "net.py", str(tmp_path / "program")
    path.write_text(FILE.split("def precision", maxsplit=1)[0])
    assert main(["show", str(path), "--plan", "dp=2", "--precision", "bf16", "--out", out, "--program"]) == 0
    assert main(["verify", str(path), "--program", out, "--precision", "bf16"]) == 0
    capsys.readouterr()
    assert main(["verify", str(path), "--program", out]) == 2
    assert "in bfloat16, the model in float32 (--precision)" in capsys.readouterr().err


def test_a_wrong_precision_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(FILE.replace("{precision}", "'float13'"))
    with pytest.raises(ModelFileError, match="'float13' is no float dtype"):
        load_model_file(path)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.up(x) @ self.up(x).t())[:8, :8] + self.mask).softmax(1).square().mean()


def test_an_infinite_buffer_is_equal_to_itself() -> None:
    result = weft.verify(Masked(), torch.randn(8, 8), plan="dp=1", precision="bf16")
    assert result.equal and result.rounded is not None and not result.rounded.wrong

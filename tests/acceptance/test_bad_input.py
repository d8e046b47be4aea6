"""Bad input ends in a clear error: what, where, what to do; exit code 2; no stack trace, no hang."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from weft.cli import main

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, y):
        hidden = torch.cumsum(self.up(x), 1)
        return nn.functional.mse_loss(self.down(hidden), y)


def model():
    return Net()


def example():
    return torch.randn(4, 6), torch.randn(4, 6)
"""

PLAN = """
from weft import Plan, copy, cut


def plan(graph, devices=2):
    plan = Plan(graph, devices)
    {lines}
    return plan
"""

FAILING = MODEL.replace(
    "class Net",
    """
import threading


class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("not on a rank")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Net""",
).replace("torch.cumsum(self.up(x), 1)", "Odd.apply(self.up(x))")


@dataclass(frozen=True)
class Case:
    name: str
    model: str | None = MODEL
    plan: str = "dp=2"
    lines: str = ""
    devices: int | None = None
    says: tuple[str, ...] = ()


CASES = (
    Case("no such model file", model=None, says=("net.py",)),
    Case("no model()", model=MODEL.replace("def model", "def modle"), says=("model()",)),
    Case("no example()", model=MODEL.replace("def example", "def exmaple"), says=("example()",)),
    Case("model() is no module", model=MODEL.replace("return Net()", "return 3"), says=("model()", "int")),
    Case("example() is no batch", model=MODEL.replace("return torch.randn(4, 6), torch.randn(4, 6)", "return 7")),
    Case("example() raises", model=MODEL.replace("return torch.randn(4, 6), ", "return torch.randn(-4, 6), ")),
    Case("example of a wrong shape", model=MODEL.replace("return torch.randn(4, 6),", "return torch.randn(4, 7),")),
    Case("syntax error", model="def model(:\n", says=("net.py",)),
    Case(
        "no loss",
        model=MODEL.replace("return nn.functional.mse_loss(self.down(hidden), y)", "return self.down(hidden)"),
    ),
    Case("unknown recipe key", plan="dq=2", says=("dq", "dp")),
    Case("recipe without value", plan="dp"),
    Case("recipe of zero parts", plan="dp=0"),
    Case("recipe twice", plan="dp=2,dp=4"),
    Case("recipe not there yet", plan="pp=2", says=("pp",)),
    Case("no such plan file", plan="nothing.yaml", says=("nothing.yaml",)),
    Case("other number of devices", plan="dp=2", devices=3, says=("3",)),
    Case("more parts than rows", plan="dp=5", says=("4", "5")),
    Case("cut where it cannot be", lines='plan = plan.trans("cumsum", cut("d1", 2))', says=("cumsum", "net.py")),
    Case("a name the rule lacks", lines='plan = plan.trans("up", cut("h", 2))', says=("'h'", "net.py")),
    Case("more parts than elements", lines='plan = plan.trans("up", cut("b0", 5))', says=("5", "net.py")),
    Case("device out of range", lines='plan = plan.trans("up", cut("n", 2)).assign("up", [0, 2])', says=("2",)),
    Case(
        "devices left idle",
        lines='plan = plan.trans("up", cut("n", 2, axis="tp"))',
        devices=3,
        says=("3 devices",),
    ),
    Case("idle by assignment", lines='plan = plan.assign("**", 0)', says=("1",)),
    Case("grid of another shape", lines='plan = plan.trans("up", cut("n", 2)).assign("up", [0, 1, 0])', says=("up",)),
    Case(
        "contradictory cuts",
        lines='plan = plan.trans("up", cut("n", 2, axis="a")).trans("up", cut("k", 2, axis="a"))',
        says=("'a'",),
    ),
    Case(
        "contradictory places",
        lines='plan = plan.trans("up", cut("n", 2)).assign("up", [0, 1]).assign("up", [1, 0])',
        says=("up",),
    ),
    Case("axis of two sizes", lines='plan = plan.trans("up", cut("n", 2, "a")).trans("down", cut("n", 3, "a"))'),
    Case("nothing selected", lines='plan = plan.trans("upp", cut("n", 2))', says=("upp",)),
    Case("no plan returned", lines="return 3", says=("int",)),
    Case("plan function raises", lines="return 1 / 0", says=("division",)),
    Case("shares of nothing", lines='plan = plan.trans("up", cut("n", [0, 0]))'),
    Case("groups that do not divide", lines='plan = plan.trans("up", cut("n", 2, groups=3))', says=("3",)),
    Case("unknown parameter", lines='plan = plan.store("up.wait", cut(0, 2, axis="dp"))', says=("up.wait",)),
    Case("a rank that raises", model=FAILING, says=("rank", "not on a rank", "net.py")),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    if case.model is not None:
        Path("net.py").write_text(case.model)
    plan = case.plan
    if case.lines:
        Path("plans.py").write_text(PLAN.format(lines=case.lines))
        plan = "plans.py:plan"
    before = set(tmp_path.iterdir())
    devices = [] if case.devices is None else ["--devices", str(case.devices)]
    code = main(["verify", "net.py", "--plan", plan, *devices, "--json"])
    told = capfd.readouterr().err
    assert code == 2, told
    assert "error:" in told and "Traceback" not in told and "fault in Weft" not in told, told
    assert "try:" in told, told
    for words in case.says:
        assert words in told, told
    assert {path for path in tmp_path.iterdir() if path.name != "__pycache__"} == before


def test_a_plan_for_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    from weft import capture
    from weft.plan.load import load_plan
    from weft.plan.plan_file import save_plan
    from weft.verify.model_file import load_model_file

    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    Path("other.py").write_text(MODEL.replace("nn.Linear(6, 8), nn.Linear(8, 6)", "nn.Linear(6, 9), nn.Linear(9, 6)"))
    subject = load_model_file("other.py")
    save_plan(load_plan("dp=2", capture(subject.model, subject.example)), "other.yaml")
    assert main(["verify", "other.py", "--plan", "other.yaml"]) == 0
    assert main(["verify", "net.py", "--plan", "other.yaml"]) == 2
    assert "another model" in capfd.readouterr().err

"""Bad input ends in a clear error: what, where, what to do; exit code 2; no stack trace, no hang."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass, field
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

STAGES = """
    from weft.ir.schedule import Event, Schedule
    from weft.order import make_schedule

    def order(pipeline):
        made, (one, *_) = make_schedule("1f1b", pipeline), pipeline.segments
        first = list(made.events[0])
        {change}
        return Schedule({{**made.events, 0: tuple(first)}})

    up = [op.name for op in graph.ops if op.path.split(".")[0] == "up"]
    rest = [op.name for op in graph.ops if op.path.split(".")[0] != "up"]
    plan = plan.stage("up", up, [0]).stage("rest", rest, [1]).cut_batch(2).order(order)
"""
"""Lines of a plan in two stages, with a change to the events of the first."""

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
    """One bad input.

    Args:
        model: the text of net.py; None: there is no such file.
        lines: of a plan function, instead of `plan`.
        files: others that are there, by name; a name that ends in / is an empty directory.
        argv: a command line, instead of `weft verify net.py --plan ...`.
        says: words of the error.
    """

    name: str
    model: str | None = MODEL
    plan: str = "dp=2"
    lines: str = ""
    devices: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    argv: str = ""
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
    Case("recipe not there yet", plan="cp=2", says=("cp",)),
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
    Case("sp without tp", plan="dp=2,sp", says=("sp", "tp")),
    Case("zero without dp", plan="tp=2,zero=3", says=("zero", "dp")),
    Case("megatron without attention", plan="megatron=7", says=("7",)),
    Case("a value where none belongs", plan="tp=2,sp=3", says=("sp",)),
    Case("an empty recipe", plan="", says=("recipe",)),
    Case("recompute what is not there", plan="dp=2,recompute=encoder.*", says=("encoder.*",)),
    Case("a plan file that is no YAML", plan="p.yaml", files={"p.yaml": "{a: ["}, says=("p.yaml",)),
    Case("a plan file of something else", plan="p.yaml", files={"p.yaml": "a: 1"}, says=("p.yaml",)),
    Case("no such plan function", plan="p.py:plan", files={"p.py": "x = 1"}, says=("plan", "p.py")),
    Case("a plan module that fails", plan="p.py:plan", files={"p.py": "import no_such_thing"}, says=("no_such_thing",)),
    Case(
        "a branch on values",
        model=MODEL.replace("hidden =", "if x.sum() > 0:\n            x = -x\n        hidden ="),
        says=("net.py",),
    ),
    Case(
        "an optimizer that is none", model=MODEL + "\n\ndef optimizer(parameters):\n    return 5\n", says=("optimizer",)
    ),
    Case("no command", argv="", says=(), model=None, plan="-"),
    Case("no such command", argv="verfy net.py", says=("verfy",)),
    Case("verify what", argv="verify net.py", says=("--plan",)),
    Case("plan and program", argv="verify net.py --plan dp=2 --program d", says=("--program",)),
    Case("no devices", argv="verify net.py --plan dp=2 --devices 0", says=("0",)),
    Case("devices in words", argv="verify net.py --plan dp=2 --devices two", says=("two",)),
    Case("no such program", argv="verify net.py --program d", says=("d",)),
    Case("an empty program", argv="verify net.py --program d", files={"d/": ""}, says=("d",)),
    Case(
        "a truncated program",
        argv="verify net.py --program d",
        files={"d/program.json": '{"devices": 2'},
        says=("program.json",),
    ),
    Case("no such costs", argv="verify net.py --plan dp=2 --links l.json", says=("l.json",)),
    Case(
        "costs of something else",
        argv="verify net.py --plan dp=2 --links l.json",
        files={"l.json": "[1]"},
        says=("l.json",),
    ),
    Case("force without out", argv="show net.py --plan dp=2 --force", says=("--out",)),
    Case("out into a file", argv="show net.py --plan dp=2 --out f", files={"f": "x"}, says=("f",)),
    Case("out over something else", argv="show net.py --plan dp=2 --out d", files={"d/x": "x"}, says=("d",)),
    Case("json and code", argv="show net.py --plan dp=2 --json --code", says=("--json",)),
    Case("no steps", argv="train net.py --plan dp=2 --steps 0", says=("0",)),
    Case("no such data", argv="train net.py --plan dp=2 --data t.txt --cache c", says=("t.txt",)),
    Case("nothing to resume", argv="train net.py --plan dp=2 --resume r --cache c", says=("r",)),
    Case("a negative clip", argv="train net.py --plan dp=2 --clip -1 --cache c", says=("clip",)),
    Case("ops of nothing", argv="ops none.py", says=("none.py",)),
    Case("a Hugging Face model that is not here", argv="ops hf:nobody/nothing", says=("nobody/nothing",)),
    Case("a configuration that is none", argv="ops hf:NoSuchConfig", says=("NoSuchConfig",)),
    Case("no such shell", argv="completion powershell", says=("powershell",)),
    Case("no such backend", argv="profile --backend mpi", says=("mpi",)),
    Case("more stages than operators", plan="pp=9,microbatches=2", says=("9 stages", "no work")),
    Case("a stage with no work", plan="pp=2,microbatches=2,stages=up", says=("'up'", "work")),
    Case("a stage list that names no module", plan="pp=2,microbatches=2,stages=side", says=("'side'", "up")),
    Case("a stage list of another length", plan="pp=3,microbatches=2,stages=down", says=("3 stages",)),
    Case("fewer rows than micro-batches", plan="pp=2,microbatches=5", says=("4 rows", "5 micro-batches")),
    Case("no micro-batches", plan="pp=2,microbatches=0", says=("0",)),
    Case("training without backward", plan="pp=2,microbatches=2,schedule=inference", says=("forwards alone",)),
    Case(
        "an order that shuffles what a buffer becomes",
        model=MODEL.replace("nn.Linear(6, 8),", "nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)),"),
        lines=STAGES.format(change="first[0], first[1] = first[1], first[0]").replace('"1f1b"', '"gpipe"'),
        says=("running_mean", "1 0"),
    ),
    Case("an unknown schedule", plan="pp=2,microbatches=2,schedule=2f2b", says=("2f2b", "1f1b")),
    Case("a schedule without pp", plan="dp=2,schedule=1f1b", says=("schedule", "pp")),
    Case("virtual stages without pp", plan="dp=2,virtual=2", says=("virtual", "pp")),
    Case("stages without pp", plan="dp=2,stages=down", says=("stages", "pp")),
    Case("an order that contradicts the data", lines=STAGES.format(change="first.reverse()"), says=("waits for",)),
    Case(
        "an order that forgets a backward",
        lines=STAGES.format(change='first.remove(Event("b", one.name, 0))'),
        says=("never runs", "b(up, 0)"),
    ),
    Case(
        "an order of what is not there",
        lines=STAGES.format(change='first.append(Event("f", "side", 0))'),
        says=("is called", "side"),
    ),
    Case("a stage on no device", lines='plan = plan.stage("a", "up", [5])', says=("[5]",)),
    Case("a stage of nothing", lines='plan = plan.stage("a", "side", [0])', says=("side",)),
    Case("an op in two stages", lines='plan = plan.stage("a", "up", [0]).stage("b", "up", [1])', says=("'a'",)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    write(case)
    before, processes = set(tmp_path.rglob("*")), set(multiprocessing.active_children())
    code = main(command_line(case))
    told = capfd.readouterr().err
    assert code == 2, told
    assert "error:" in told and "Traceback" not in told and "fault in Weft" not in told, told
    assert "try:" in told or "usage:" in told, told
    for words in case.says:
        assert words in told, told
    assert {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts} == before
    assert set(multiprocessing.active_children()) == processes


def write(case: Case) -> None:
    """The files of a case, in the current directory."""
    if case.model is not None:
        Path("net.py").write_text(case.model)
    if case.lines:
        Path("plans.py").write_text(PLAN.format(lines=case.lines))
    for name, text in case.files.items():
        path = Path(name)
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(text)


def command_line(case: Case) -> list[str]:
    if case.argv or case.plan == "-":
        return case.argv.split()
    devices = [] if case.devices is None else ["--devices", str(case.devices)]
    return ["verify", "net.py", "--plan", "plans.py:plan" if case.lines else case.plan, *devices, "--json"]


def test_there_are_sixty() -> None:
    assert len(CASES) >= 60 and len({case.name for case in CASES}) == len(CASES)


def test_a_plan_for_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    from weft import capture
    from weft.compile.model_file import load_model_file
    from weft.plan.load import load_plan
    from weft.plan.plan_file import save_plan

    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    Path("other.py").write_text(MODEL.replace("nn.Linear(6, 8), nn.Linear(8, 6)", "nn.Linear(6, 9), nn.Linear(9, 6)"))
    subject = load_model_file("other.py")
    save_plan(load_plan("dp=2", capture(subject.model, subject.example)), "other.yaml")
    assert main(["verify", "other.py", "--plan", "other.yaml"]) == 0
    assert main(["verify", "net.py", "--plan", "other.yaml"]) == 2
    assert "another model" in capfd.readouterr().err

"""End to end: correct plans are equal, wrong Programs are different, and the first difference is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from tests.pieces import compile_pieces
from weft.cli import main
from weft.codegen import generate
from weft.compile.model_file import Subject
from weft.compile.pieces import InPieces
from weft.compile.subject import capture_subject, make_plan, make_subject
from weft.errors import ModelFileError, PlanError, RunError
from weft.ir.program import Program, Reshard, Step, Sync
from weft.lower import lower
from weft.plan import Plan
from weft.runtime.program.module import ParallelModule
from weft.runtime.random import Stream
from weft.verify import judged
from weft.verify.compare import Result

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.smoke
@pytest.mark.parametrize("plan", ["dp=2", "dp=3", "tp=4", "dp=2,tp=2", "dp=2,coshard=2"])
def test_mlp_equals_one_device(plan: str) -> None:
    result = weft.verify(EXAMPLES / "mlp.py", plan=plan)
    assert result.equal and result.largest_difference < 1e-14, str(result)
    assert result.first_difference is None and not result.disagreements
    # In float32 the same plan must show some rounding, or the float64 runs were not what they seem.
    assert 1e-9 < max(found.value for found in result.rounding) < 1e-4


@pytest.mark.parametrize("plan", ["dp=2,tp=2", "coshard=4"])
def test_gpt_equals_one_device(plan: str) -> None:
    result = weft.verify(EXAMPLES / "gpt.py", plan=plan)
    assert result.equal, str(result)


def test_the_command_on_a_model_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(EXAMPLES / "mlp.py"), "--plan", "dp=2", "--json"]) == 0
    out = capsys.readouterr().out
    assert "equal to one device" in out
    assert json.loads(out.strip().splitlines()[-1])["equal"] is True


@pytest.fixture(scope="module")
def mlp() -> Subject:
    return make_subject(EXAMPLES / "mlp.py", None)


def program_of(subject: Subject, plan: str) -> Program:
    graph = capture_subject(subject)
    return lower(make_plan(plan, graph, subject, None))


def judge(program: Program, subject: Subject) -> Result:
    pieces = InPieces.of(Plan(program.graph, program.devices), program)
    return judged.judge(generate(program), program.graph, subject, seed=0, tolerance=1e-9, pieces=pieces)


def change(program: Program, edit: Callable[[Step], Step]) -> Program:
    changed = replace(program, steps=tuple(edit(step) for step in program.steps))
    assert changed.steps != program.steps, "the fault was not planted"
    return changed


def test_a_dropped_gradient_sync_is_seen_in_the_gradients(mlp: Subject) -> None:
    def drop(step: Step) -> Step:
        if isinstance(step, Sync) and step.parameter.endswith("up.weight"):
            return replace(step, moves=tuple(() for _ in step.moves))
        return step

    result = judge(change(program_of(mlp, "dp=2"), drop), mlp)
    assert not result.equal
    assert any("up.weight" in text for text in result.disagreements), "copies of the gradient must disagree"
    assert result.first_difference is not None and result.first_difference.tensor == "up.weight"
    assert "backward" in result.first_difference.note
    assert [found.kind for found in result.differences if found.value < 1e-9] == []


def test_a_dropped_forward_sum_names_the_operator_and_its_line(mlp: Subject) -> None:
    program = program_of(mlp, "tp=2")
    down = next(op for op in program.graph.ops if op.path == "down" and op.kind == "linear")

    def drop(step: Step) -> Step:
        if isinstance(step, Reshard) and program.values[step.source].tensor == down.outputs[0]:
            return replace(step, forward=())
        return step

    result = judge(change(program, drop), mlp)
    assert not result.equal and result.first_difference is not None
    # The addends of `down` themselves are right; what reads them before they are summed is the first to differ.
    after = program.graph.ops[program.graph.ops.index(down) + 1]
    assert result.first_difference.op == after.name
    assert "mlp.py:" in result.first_difference.source and result.first_difference.difference > 1e-3


def test_a_wrong_random_stream_is_found_at_the_dropout(mlp: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    program, call = program_of(mlp, "dp=2"), ParallelModule.__call__

    def shifted(self: ParallelModule, *inputs: torch.Tensor) -> object:
        if self.transport.num_ranks > 1:
            self.stream = Stream(self.stream.seed + 1, self.stream.step, self.stream.microbatch)
        return call(self, *inputs)

    monkeypatch.setattr(ParallelModule, "__call__", shifted)
    result = judge(program, mlp)
    assert not result.equal and result.first_difference is not None
    assert result.first_difference.op.startswith("dropout")


def test_a_graph_unlike_the_model_is_told_as_such(mlp: Subject) -> None:
    graph = capture_subject(mlp)
    wrong = tuple(replace(op, kwargs=(("approximate", "tanh"),)) if op.kind == "gelu" else op for op in graph.ops)
    assert wrong != graph.ops
    program = lower(Plan(replace(graph, ops=wrong), devices=1))
    result = judge(program, mlp)
    assert not result.equal and result.first_difference is not None
    assert "differs from the eager model" in result.first_difference.note
    assert "outside its inputs and parameters" in result.first_difference.remedy


def test_a_rank_that_raises_is_a_run_error(mlp: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = ParallelModule.finish

    def fail(self: ParallelModule, *values: torch.Tensor) -> torch.Tensor:
        if self.transport.rank == 1:
            raise ValueError("out of luck")
        return finish(self, *values)

    monkeypatch.setattr(ParallelModule, "finish", fail)
    with pytest.raises(RunError, match="rank 1 failed: ValueError: out of luck"):
        judge(program_of(mlp, "dp=2"), mlp)


@pytest.mark.parametrize("name", ["inner", "stored", "comm"])
def test_layers_in_a_list_under_a_name_of_the_runtime(name: str) -> None:
    """What runs is the generated code: verify sees what training would."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in getattr(self, name):
                x = layer(x).relu()
            return x.mean()

    assert weft.verify(Holder(), (torch.randn(4, 4),), plan="dp=2").equal


def test_the_first_difference_in_a_pipeline(mlp: Subject) -> None:
    graph, make = capture_subject(mlp), lambda other: make_plan("pp=2,microbatches=2", other, mlp, None)
    made = compile_pieces(mlp, make(graph), make)
    first, *others = made.sizes[0].parts
    wrong = tuple(
        replace(op, kwargs=(("approximate", "tanh"),)) if op.kind == "gelu" else op for op in first.program.graph.ops
    )
    assert wrong != first.program.graph.ops
    part = replace(first, program=replace(first.program, graph=replace(first.program.graph, ops=wrong)))
    bad = replace(made, sizes=(replace(made.sizes[0], parts=(part, *others)),))
    result = judged.judge(bad.files(), graph, mlp, seed=0, tolerance=1e-9, pieces=bad)
    assert not result.equal and result.first_difference is not None
    assert result.first_difference.op.startswith("gelu") and "mlp.py:" in result.first_difference.source


class Counting(nn.Module):
    """Batch statistics: buffers that the forward updates, floats and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x))).square().mean()


def test_buffers_are_compared_and_modules_work_too() -> None:
    torch.manual_seed(0)
    model = Counting()
    graph = weft.capture(model, (torch.randn(8, 4),))
    result = weft.verify(model, (torch.randn(8, 4),), plan=Plan(graph, devices=1))
    assert result.equal, str(result)
    model.norm.num_batches_tracked.add_(1)
    assert weft.verify(model, (torch.randn(8, 4),), plan=Plan(graph, devices=1)).equal


@pytest.mark.parametrize(
    ("plan", "devices"), [("dp=2", 3), ("dp=200", None), ("qp=2", None), ("absent.yaml", None), ("absent.py:plan", 2)]
)
def test_bad_plans(plan: str, devices: int | None) -> None:
    with pytest.raises(PlanError):
        weft.verify(EXAMPLES / "mlp.py", plan=plan, devices=devices)


def test_a_plan_for_another_model() -> None:
    model, batch = Counting(), (torch.randn(8, 4),)
    plan = Plan(weft.capture(model, batch), devices=1)
    for other, example in (
        (make_subject(EXAMPLES / "mlp.py", None).model, batch),
        (model, (torch.randn(9, 4),)),
        (model, (torch.randn(8, 4), torch.ones(1))),
    ):
        with pytest.raises(PlanError, match="another"):
            weft.verify(other, example, plan=plan)


def test_bad_subjects() -> None:
    with pytest.raises(ModelFileError, match="no example"):
        weft.verify(nn.Linear(2, 2), plan="dp=2")
    with pytest.raises(ModelFileError, match="no loss"):
        weft.verify(nn.Linear(2, 2), (torch.ones(2, 2),), plan="dp=2")
    frozen = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)).requires_grad_(False)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = frozen

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).mean()

    with pytest.raises(ModelFileError, match="depends on no trained parameter"):
        weft.verify(Mean(), (torch.ones(2, 2),), plan="dp=2")


def test_a_plan_function() -> None:
    def plan(graph: weft.Graph) -> Plan:
        return Plan(graph, devices=1)

    assert weft.verify(EXAMPLES / "mlp.py", plan=plan).equal
    with pytest.raises(PlanError, match="returned a int"):
        weft.verify(EXAMPLES / "mlp.py", plan=lambda graph: 3)  # type: ignore[arg-type, return-value]

"""Models on processes: equal to one device, and equal to the emulator bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.acceptance.subjects import linears, prepared
from tests.processes import bodies
from tests.processes.conftest import Pools
from weft.capture import capture
from weft.cli import main
from weft.codegen import generate
from weft.compile.model_file import Subject
from weft.compile.pieces import InPieces
from weft.errors import RunError
from weft.ir.graph import Graph
from weft.lower import lower
from weft.lower.check import check
from weft.plan.load import load_plan
from weft.plan.plan import Plan
from weft.plan.primitives import cut
from weft.verify.compare import Sample, compare
from weft.verify.generated import run_generated
from weft.verify.judged import judge
from weft.verify.processes import compare_with_emulator
from weft.verify.reference import run_reference

EXAMPLES = Path(__file__).parents[2] / "examples"


def equal_to_one_device(name: str, plan: Plan, pools: Pools) -> None:
    subject, _, reference = prepared(name)
    program = lower(plan)
    check(program)
    files = generate(program)
    ours = run_generated(
        files, program.graph, subject, seed=7, wide=True, reference=reference, pool=pools(program.devices)
    )
    assert not ours.disagreements
    worst = max(compare(ours, reference), key=lambda found: found.value)
    assert worst.value < 1e-9, worst
    emulated = run_generated(files, program.graph, subject, seed=7, wide=True, reference=reference)
    found = compare_with_emulator(ours, emulated, program.devices)
    assert found.equal_bits, found


def disjoint_devices(graph: Graph) -> Plan:
    """The first linear on devices 0 and 1, the second on 2 and 3."""
    first, second = linears(graph)[:2]
    plan = Plan(graph, 4).trans(first, cut("n", 2, axis="x")).assign(first, [0, 1])
    return plan.trans(second, cut("k", 2, axis="y")).assign(second, [2, 3])


def test_disjoint_devices(pools: Pools) -> None:
    equal_to_one_device("mlp", disjoint_devices(prepared("mlp")[1]), pools)


def test_a_difference_from_the_emulator_is_told() -> None:
    _, _, reference = prepared("mlp")
    weights = {name: tensor.clone() for name, tensor in reference.weights.items()}
    next(iter(weights.values())).view(-1)[0] *= 1 + 1e-15
    found = compare_with_emulator(Sample(reference.losses, reference.gradients, weights), reference, "gloo")
    assert not found.equal_bits and 0 < found.difference < 1e-14 and found.tensor == next(iter(weights)) and found.why


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(EXAMPLES / "mlp.py"), "--plan", "tp=2", "--processes", "--json"]) == 0
    out = capsys.readouterr().out
    assert "on gloo processes: equal to the emulator bit for bit" in out
    found = json.loads(out.strip().splitlines()[-1])
    assert found["equal"] and found["processes"]["equal_bits"]


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum()


def test_a_failing_rank_is_a_run_error(pools: Pools) -> None:
    subject = Subject(Fails(), (torch.randn(4, 4),), optimizer=bodies.bad_optimizer)
    program = lower(load_plan("dp=2", capture(subject.model, subject.example)))
    failed = pytest.raises(RunError, match="rank 0 failed: ValueError: no optimizer today")
    with failed:
        run_generated(generate(program), program.graph, subject, seed=0, wide=True, pool=pools(2))


class Stateful(nn.Module):
    """Dropout, running statistics, and more to return than the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.down(nn.functional.dropout(self.norm(self.up(x)), 0.3, self.training))
        return {"loss": y.square().mean(), "y": y}


@pytest.mark.parametrize("recipe", ["dp=2", "tp=2"])
def test_buffers_dropout_and_other_outputs(recipe: str, pools: Pools) -> None:
    torch.manual_seed(3)
    subject = Subject(Stateful(), (torch.randn(6, 8),))
    program = lower(load_plan(recipe, capture(subject.model, subject.example)))
    reference = run_reference(subject, seed=7, wide=True)
    files = generate(program)
    ours = run_generated(files, program.graph, subject, seed=7, wide=True, reference=reference, pool=pools(2))
    assert "norm.running_var" in ours.weights and not ours.disagreements
    assert max(found.value for found in compare(ours, reference)) < 1e-9
    emulated = run_generated(files, program.graph, subject, seed=7, wide=True, reference=reference)
    assert compare_with_emulator(ours, emulated, 2).equal_bits


def test_wrong_code_of_a_right_program_is_found(pools: Pools) -> None:
    subject, graph, _ = prepared("mlp")
    plan = load_plan("dp=2", graph)
    program = lower(plan)
    files = generate(program)
    text = files["program.py"].decode()
    assert text.count('"up.bias": Part((12,), sync="dp")') == 1
    files["program.py"] = text.replace('"up.bias": Part((12,), sync="dp")', '"up.bias": Part((12,))').encode()
    found = judge(files, graph, subject, seed=7, tolerance=1e-9, pool=pools(2), pieces=InPieces.of(plan, program))
    assert not found.equal and found.first_difference is not None and found.first_difference.tensor == "up.bias"

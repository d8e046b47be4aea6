"""Programs in pieces as they lie in a directory: as emitted, edited, stale; verify trains as training does."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.cli import main
from weft.compile.model_file import adamw, load_model_file
from weft.compile.subject import capture_subject
from weft.errors import PlanError, RunError
from weft.runtime.program.files import PROGRAM, changes
from weft.verify import verify, verify_program
from weft.verify.compare import compare
from weft.verify.generated import run_generated
from weft.verify.program_dir import order_of
from weft.verify.reference import run_reference

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlp.py"
GPT = EXAMPLE.with_name("gpt.py")
PLAN = "pp=2,microbatches=5"
"""Twelve rows in five: micro-batches of two sizes."""


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("emitted") / "program"
    assert main(["show", str(EXAMPLE), "--plan", PLAN, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def place(tmp_path: Path, emitted: Path):
    """Copies the program, with one text replaced by another in a file."""

    def put(file: str = "piece0/program.py", old: str = "", new: str = "") -> Path:
        folder = tmp_path / "program"
        shutil.copytree(emitted, folder)
        text = (folder / file).read_text()
        assert text.count(old) >= 1, text
        (folder / file).write_text(text.replace(old, new, 1))
        return folder

    return put


def test_as_emitted(place, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place()
    assert main(["verify", str(EXAMPLE), "--program", str(folder), "--json"]) == 0
    found = capsys.readouterr()
    out = found.out
    assert "is as emitted" in out + found.err and "2 pieces, 5 micro-batches a step" in out
    said = json.loads(out.strip().splitlines()[-1])
    assert said["equal"] and said["program"] == {"directory": str(folder), "edited": [], "stale": []}
    assert said["microbatches"] == 5 and len(said["pieces"]) == 2


def test_a_print_changes_no_number(place, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place("piece0/program.py", "        y = F.gelu(", '        print("in piece 0")\n        y = F.gelu(')
    assert main(["verify", str(EXAMPLE), "--program", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "is edited (piece0/program.py)" in out.splitlines()[0] and "in piece 0" in out and "equal to one" in out


@pytest.mark.parametrize("file", ["piece0/program.py", "piece0-size1/program.py"])
def test_a_changed_operator(place, file: str) -> None:
    found = verify_program(EXAMPLE, program=place(file, "F.gelu(", "F.relu("))
    assert not found.equal and found.summary["program"]["edited"] == [file]
    assert found.first_difference is not None and "the fault is in forward" in found.first_difference.note


def test_an_error_while_it_runs_is_told_with_its_line(place) -> None:
    with pytest.raises(RunError, match="NameError: name 'yy' is not defined") as caught:
        verify_program(EXAMPLE, program=place("piece0/program.py", "F.gelu(up)", "F.gelu(yy)"))
    assert "piece0/program.py:" in caught.value.place and "F.gelu(yy)" in caught.value.place


def edit_events(folder: Path, device: str, first: int, second: int) -> None:
    """Exchange two events of a device."""
    told: dict[str, Any] = json.loads((folder / PROGRAM).read_text())
    row = told["events"][device]
    row[first], row[second] = row[second], row[first]
    (folder / PROGRAM).write_text(json.dumps(told))


def test_another_order_is_an_edit_and_verified(place) -> None:
    folder = place()
    _, schedule = order_of(json.loads((folder / PROGRAM).read_text()))
    assert str(schedule).startswith("0: F0 F1 B0 F2")
    edit_events(folder, "0", 2, 3)
    assert changes(folder) == {PROGRAM: "edited"}
    found = verify_program(EXAMPLE, program=folder)
    assert found.equal and found.summary["schedule"]["0"].startswith("F0 F1 F2 B0")


def test_an_order_with_a_circle_is_refused_before_it_runs(place) -> None:
    folder = place()
    edit_events(folder, "0", 0, 2)
    with pytest.raises(PlanError, match="before"):
        verify_program(EXAMPLE, program=folder)


def test_stale_but_fitting_is_verified_and_said(place, tmp_path: Path) -> None:
    changed = tmp_path / "mlp.py"
    changed.write_text(EXAMPLE.read_text().replace("functional.gelu", "functional.relu"))
    told: list[str] = []
    found = verify_program(changed, program=place(), tell=told.append)
    assert not found.equal and "stale: made from another state of the model" in told[0]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("hidden=32", "hidden=48", r"it stores up.weight as \[32, 16\], the model has \[48, 16\]"),
        ("(12, 16)", "(8, 16)", r"takes .* as \[12, 16\] of float32, the example has \[8, 16\]"),
    ],
)
def test_what_does_not_fit_is_refused(place, tmp_path: Path, old: str, new: str, what: str) -> None:
    changed = tmp_path / "mlp.py"
    changed.write_text(EXAMPLE.read_text().replace(old, new))
    with pytest.raises(PlanError, match=what):
        verify_program(changed, program=place())


@pytest.mark.parametrize("name", ["piece1/program.py", "piece0-size1/parts.json"])
def test_a_missing_file(place, name: str) -> None:
    folder = place()
    (folder / name).unlink()
    with pytest.raises(RunError, match=f"lacks {name}"):
        verify_program(EXAMPLE, program=folder)


@pytest.mark.parametrize("name", [PROGRAM, "piece1/parts.json"])
def test_a_truncated_file(place, name: str) -> None:
    folder = place()
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 3])
    with pytest.raises(RunError, match="cannot be read"):
        verify_program(EXAMPLE, program=folder)


def test_a_tied_weight_of_two_pieces_on_one_rank_is_one_parameter(tmp_path: Path) -> None:
    plan = "pp=2,microbatches=4,schedule=zb-v"
    assert main(["show", str(GPT), "--plan", plan, "--out", str(tmp_path / "program")]) == 0
    subject, given = load_model_file(GPT), list[list[torch.nn.Parameter]]()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        given.append(list(parameters))
        return adamw(given[-1])

    subject = replace(subject, optimizer=optimizer)
    folder, graph = tmp_path / "program", capture_subject(subject)
    reference = run_reference(load_model_file(GPT), seed=0, wide=True, microbatches=4)
    ours = run_generated(folder, graph, subject, seed=0, wide=True, reference=reference)
    # both ends of the model are on one device; a weight of the attention, one on each, has the same shape
    alike = [sum(one.shape == (96, 32) for one in parameters) for parameters in given]
    assert sorted(alike) == [1, 2]
    assert not ours.disagreements and max(found.value for found in compare(ours, reference)) < 1e-9


def test_an_optimizer_that_mixes_elements_is_refused_for_weights_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "mlp.py"
    text = EXAMPLE.read_text() + "\n\ndef optimizer(parameters):\n    return torch.optim.Adafactor(parameters)\n"
    path.write_text(text)
    with pytest.raises(PlanError, match="Adafactor mixes the elements"):
        verify(path, plan="pp=2,tp=2,microbatches=2")


def test_on_processes(place) -> None:
    folder = place("piece0/program.py", "        y = F.gelu(", "        up = up + 0\n        y = F.gelu(")
    found = verify_program(EXAMPLE, program=folder, processes=True)
    assert found.equal and found.processes is not None and found.processes.equal_bits

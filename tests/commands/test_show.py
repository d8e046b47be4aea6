"""`weft show`: the table by module, the code and nothing else, files that are not overwritten when edited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.capture import capture
from weft.cli import main
from weft.commands.modules import module_rows
from weft.compile.model_file import load_model_file
from weft.lower import lower
from weft.plan.load import load_plan
from weft.runtime.program.files import changes

EXAMPLES = Path(__file__).parents[2] / "examples"
MLP, GPT = str(EXAMPLES / "mlp.py"), str(EXAMPLES / "gpt.py")


@pytest.fixture(scope="module")
def gpt_rows():
    subject = load_model_file(GPT)
    graph = capture(subject.model, subject.example)
    return {row.module: row for row in module_rows(lower(load_plan("dp=2,tp=2", graph)))}


def test_layers_are_one_row(gpt_rows) -> None:
    row = gpt_rows["blocks.*.mlp.up"]
    assert row.layers == 2 and row.operators == 2 and row.devices == ["0-3"]
    assert row.cuts["tp"] == ["n 2"] and list(row.cuts) == ["dp", "tp"]
    assert not any(part.isdigit() for name in gpt_rows for part in name.split("."))


def test_bytes_of_a_known_plan() -> None:
    """Under dp=2 every gradient is summed over two devices: each sends all of its bytes once; the loss too."""
    subject = load_model_file(MLP)
    graph = capture(subject.model, subject.example)
    rows = {row.module: row for row in module_rows(lower(load_plan("dp=2", graph)))}
    assert rows["up"].moved == 4 * (32 * 16 + 32) and rows["up"].collectives == {"all_reduce": 2}
    assert rows["down"].moved == 4 * (32 * 16 + 16)
    assert sum(row.moved for row in rows.values()) == 4 * (2 * 32 * 16 + 32 + 16 + 1)


def test_operators_that_talk_inside_are_named(gpt_rows) -> None:
    assert sum(row.collectives["inside"] for row in gpt_rows.values()) == 1


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", MLP, "--plan", "tp=2"]) == 0
    out = capsys.readouterr().out
    assert "mlp.py under tp=2: 2 devices, cut by tp=2" in out and "collectives, sends" in out
    assert "proven:" in out


def test_code_is_all_of_stdout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    loud = tmp_path / "loud.py"
    loud.write_text(Path(MLP).read_text() + '\nprint("importing")\n')
    assert main(["show", str(loud), "--plan", "dp=2", "--code", "--out", str(tmp_path / "program")]) == 0
    out = capsys.readouterr().out
    assert out == (tmp_path / "program" / "program.py").read_text()


def test_program_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", MLP, "--plan", "dp=2", "--program"]) == 0
    assert capsys.readouterr().out.startswith("program of MLP on 2 devices\n")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", MLP, "--plan", "dp=2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (
        said["devices"] == 2 and said["axes"] == {"dp": 2} and "class MLP(ParallelModule" in said["code"]["program.py"]
    )
    assert {"up", "down"} < {row["module"] for row in said["modules"]}


def test_an_edited_program_is_not_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "program"
    show = ["show", MLP, "--plan", "dp=2", "--out", str(folder)]
    assert main(show) == 0 and main(show) == 0 and not changes(folder)
    path = folder / "program.py"
    path.write_text(path.read_text() + "# mine\n")
    assert main(show) == 2 and path.read_text().endswith("# mine\n")
    assert "was edited: program.py" in capsys.readouterr().err
    assert main([*show, "--force"]) == 0 and not changes(folder)


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    show = ["show", MLP, "--plan", "dp=2", "--out", str(tmp_path), "--force"]
    assert main(show) == 2 and [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_contradictions(tmp_path: Path) -> None:
    assert main(["show", MLP, "--plan", "dp=2", "--force"]) == 2
    assert main(["show", MLP, "--plan", "dp=2", "--json", "--code"]) == 2


@pytest.mark.parametrize("command", ["verify", "show", "train", "profile"])
def test_help_ends_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"example:\n  weft {command}" in capsys.readouterr().out


def test_a_program_replaces_another_and_leaves_no_folders(tmp_path: Path) -> None:
    out = tmp_path / "program"
    assert main(["show", MLP, "--plan", "pp=2,microbatches=2", "--out", str(out)]) == 0
    assert (out / "piece0").is_dir()
    assert main(["show", MLP, "--plan", "dp=2", "--out", str(out)]) == 0
    assert sorted(one.name for one in out.iterdir()) == ["parts.json", "program.json", "program.py"]


def test_out_below_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.py"
    file.touch()
    for path in (file, file / "x", file / "x" / "y"):
        assert main(["show", MLP, "--plan", "dp=2", "--out", str(path)]) == 2
        assert f"error: {file} is a file\n  at: --out {path}" in capsys.readouterr().err


def test_stages_have_a_program_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", MLP, "--plan", "pp=2,microbatches=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["program"].startswith("# ") and found["program"].count("program of ") == 2


@pytest.mark.parametrize(
    "command",
    [
        ["ops", GPT],
        ["show", GPT, "--plan", "dp=2,tp=2"],
        ["show", GPT, "--plan", "pp=2,microbatches=4"],
        ["show", GPT, "--plan", "dp=2,zero=3", "--memory"],
    ],
)
def test_tables_are_as_wide_as_columns_says(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    rule = next(number for number, line in enumerate(lines) if line.startswith("─"))
    assert all(0 < len(line) <= 80 for line in lines[rule - 1 : rule + 3]), lines[rule - 1 :]

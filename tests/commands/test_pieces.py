"""`weft show` and `weft verify` of plans in stages and micro-batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli import main
from weft.runtime.program.files import changes

EXAMPLES = Path(__file__).parents[2] / "examples"
MLP, GPT = str(EXAMPLES / "mlp.py"), str(EXAMPLES / "gpt.py")
PLAN = "pp=2,microbatches=4"


def test_the_table_of_stages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["show", GPT, "--plan", PLAN]) == 0
    out = capsys.readouterr().out
    assert "gpt.py under pp=2,microbatches=4: 2 devices, 2 pieces, 4 micro-batches" in out
    # two rows of 16 tokens, 32 wide, in float32 would be 4 KiB; a micro-batch has three of them
    assert "6 KiB to blocks.1..head" in out and "tied: tokens.weight in" in out and "idle 20.0%" in out


def test_the_time_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["show", GPT, "--plan", PLAN, "--schedule"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["0", "F0", "F1", ".", ".", "B0---", "F2", "B1---", "F3", "B2---", ".", "B3---"]
    assert lines[3] == "makespan 15, idle 20.0%, live 2 1" and lines[4].startswith("F forward, B backward, twice as")
    assert lines[5].startswith("idle 20.0% if pieces take equally long, ") and lines[5].endswith("estimated times")
    assert main(["show", MLP, "--plan", "dp=2", "--schedule"]) == 2
    assert "--schedule draws stages" in capsys.readouterr().err
    assert main(["show", MLP, "--plan", PLAN, "--schedule", "--json"]) == 2


def test_devices_that_run_the_same_share_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", MLP, "--plan", "dp=2,pp=2,microbatches=2", "--schedule"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["0-1", "F0", "F1"] and lines[2].split()[:3] == ["2-3", ".", "F0"]
    assert lines[3].endswith("live 2 1")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", GPT, "--plan", PLAN, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    first, second = said["pieces"]
    assert first["devices"] == [0] and first["gives"] == {second["piece"]: 6144} and second["gives"] == {}
    assert first["work"] + second["work"] == pytest.approx(1) and said["microbatches"] == 4
    # the second piece, with the head, is heavier: the first waits for it
    assert 0.5 < second["time"] < 0.6 and 0.2 < said["idle_estimated"] < 0.35
    assert said["schedule"]["1"][0] == f"f({second['piece']}, 0)"
    assert "class GPT" in said["code"]["piece1/program.py"]


def test_files_are_written_and_edits_are_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "program"
    show = ["show", MLP, "--plan", PLAN, "--out", str(folder)]
    assert main([*show, "--code"]) == 0 and main(show) == 0 and changes(folder) == {}
    path = folder / "piece0" / "program.py"
    text = path.read_text()
    assert text in capsys.readouterr().out and text.endswith("micro-batch:\n# F0 F1 B0 F2 B1 F3 B2 B3\n")
    path.write_text(text + "# mine\n")
    assert main(show) == 2 and path.read_text().endswith("# mine\n")
    assert "was edited: piece0/program.py" in capsys.readouterr().err
    assert main([*show, "--force"]) == 0 and changes(folder) == {}
    # another program in its place leaves none of its files
    assert main(["show", MLP, "--plan", "dp=2", "--out", str(folder)]) == 0
    assert not list(folder.glob("piece*/*")) and changes(folder) == {}


def test_verify_says_what_runs_when(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", MLP, "--plan", PLAN, "--json"]) == 0
    out = capsys.readouterr().out
    assert "2 pieces, 4 micro-batches a step, idle 20.0%" in out and "  0: F0 F1 B0 F2 B1 F3 B2 B3" in out
    assert "cuts nothing" not in out
    summary = json.loads(out.splitlines()[-1])
    assert summary["microbatches"] == 4 and summary["schedule"]["1"] == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert summary["idle"] == pytest.approx(0.2)

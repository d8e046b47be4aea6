"""weft simulate, weft explain, and weft profile of a model: what they say, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.cli import main

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")
MLP = str(Path(__file__).parents[2] / "examples" / "mlp.py")
A100 = "8-A100-80GB"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.fixture(autouse=True)
def no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's profile is read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.smoke
def test_one_plan(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = told(capsys, "simulate", MLP, "--plan", "dp=2", "--cluster", A100)["plans"]
    assert row["plan"] == "dp=2" and row["fits"] and row["seconds"] > 0
    (rank,) = row["ranks"]
    assert rank["alike"] == 2
    assert rank["busy"] + rank["exposed"] + rank["bubble"] + rank["host"] == pytest.approx(row["seconds"])


def test_several_are_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", MLP, "--plan", "dp=2; tp=2 ;dp=8", "--cluster", "4-A100-80GB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {tuple(line.split()[:2]) for line in lines[3:5]} == {("dp=2", "2"), ("tp=2", "2")}
    assert lines[5].startswith("dp=8: the plan is for 8 devices") and "(try: " in lines[5]
    assert "data sheets" in lines[-1]


def test_long_names_of_plans_leave_numbers_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plans = f"dp=2,{'recompute=' + 'x' * 40};dp=2,recompute=**,zero=1,zero_parameters=**.weight"
    assert main(["simulate", MLP, "--plan", plans, "--cluster", A100]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dp=2,recompute=**,")]
    assert row.split()[2] in ("us", "ms") and row.split()[-1] == "fits"


def test_none_of_several_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lossless.py"
    path.write_text(
        "import torch\ndef model(): return torch.nn.Linear(8, 8)\ndef example(): return (torch.randn(4, 8),)\n"
    )
    assert main(["simulate", str(path), "--plan", "dp=2;tp=2", "--cluster", A100]) == 2
    assert capsys.readouterr().out.count("the forward gives no loss") == 2


def test_devices_of_several_kinds_are_not_alike(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = told(capsys, "simulate", MLP, "--plan", "dp=2", "--cluster", "1x1-H100+1x1-V100-32GB")["plans"]
    first, second = row["ranks"]
    assert first["alike"] == second["alike"] == 1 and first["busy"] < second["busy"]


def test_a_time_line_for_perfetto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "line.json"
    assert main(["simulate", MLP, "--plan", "dp=2", "--cluster", A100, "--timeline", str(path)]) == 0
    assert any(one.get("ph") == "X" for one in json.loads(path.read_text())["traceEvents"])


CLUSTER = """
name: tight
hosts: 1
devices: 2
device: {name: tiny, kind: cuda, memory: 1073743872 B, flops: {float32: 1e12}, bandwidth: 100 GB/s, launch: 5 us}
levels: [{name: link, span: 2, bandwidth: 10 GB/s, latency: 5 us, peer_latency: 1 us}]
"""


@pytest.fixture
def tight(tmp_path: Path) -> str:
    """A cluster whose devices hold next to nothing beside what is reserved."""
    path = tmp_path / "tight.yaml"
    path.write_text(CLUSTER)
    return str(path)


def test_what_does_not_fit_says_why(tight: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", MLP, "--plan", "dp=2", "--cluster", tight]) == 0
    out = capsys.readouterr().out
    assert "does not fit: rank 0 holds" in out and "more than tiny has" in out and "try:" in out


def test_the_largest_batch_does_fit_and_the_next_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(CLUSTER.replace("1073743872", str((1 << 30) + (1 << 20))))
    found = told(capsys, "simulate", MLP, "--plan", "dp=2", "--cluster", str(path), "--largest", "batch")
    assert found["size"] % found["example"] == 0 and found["memory"] <= 1 << 20
    assert found["next"] == found["size"] + found["example"]


def test_what_would_be_faster(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "explain", GPT, "--plan", "tp=2", "--cluster", A100)
    assert sum(one["seconds"] for one in found["path"]) == pytest.approx(found["seconds"])
    assert all(seconds <= found["seconds"] * 1.001 for seconds in found["what_if"].values())
    assert not any("program.py" in one["what"] and "gpt.py" in one["what"] for one in found["path"])
    assert main(["explain", GPT, "--plan", "tp=2", "--cluster", A100]) == 0
    assert "of the devices' time is" in capsys.readouterr().out


def test_a_profile_of_a_model_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = str(tmp_path / "own.db")
    found = told(capsys, "profile", MLP, "--plan", "dp=1", "--profile", profile)
    assert "measured on this machine" in found["profile"] and not found["refused"]
    assert main(["simulate", MLP, "--plan", "dp=1;dp=2", "--profile", profile]) == 0
    out = capsys.readouterr().out
    assert "times of dp=1: measured on this machine" in out and "distinct operators" not in out
    assert "times of dp=2: a roofline of cpu; nothing was measured here with 2 processes" in out
    assert main(["simulate", GPT, "--plan", "dp=1", "--profile", profile]) == 0
    assert "estimated: --measure" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plan", "dp=2", "--cluster", "8-A10"], "did you mean 'A100"),
        (["--plan", "dp=12", "--cluster", A100], "the plan is for 12 devices"),
        (["--plan", "dp=2", "--cluster", "none.yaml"], "no cluster file"),
        (["--plan", "dp=2", "--cluster", A100, "--measure"], "another one"),
        (["--plan", " ; "], "no plan is given"),
        (["--plan", "dp=2;tp=2", "--largest", "batch"], "one plan"),
        (["--plan", "qq=2", "--largest", "batch"], "error: 'qq' is no setting"),
        (["--plan", "dp=2", "--largest", "batch", "--timeline", "line.json"], "no time line"),
        (["--plan", "dp=2", "--timeline", "/nowhere/line.json"], "/nowhere/line.json cannot be written"),
        (["--plan", "dp=2", "--profile", "nowhere.db"], "there is no profile nowhere.db"),
        (["--plan", "dp=2", "--cluster", A100, "--profile", "nowhere.db"], "another one"),
    ],
)
def test_bad_input(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", MLP, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_largest_of_what_does_not_fit_at_all(tight: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", MLP, "--plan", "dp=2", "--cluster", tight, "--largest", "batch"]) == 2
    assert "the example itself" in capsys.readouterr().err


MODELS = Path(__file__).parents[2] / "examples" / "models"


def test_experts_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """Fake tensors know of grouped products in bfloat16 alone."""
    (row,) = told(capsys, "simulate", str(MODELS / "mixtral.py"), "--plan", "dp=2", "--cluster", A100)["plans"]
    assert row["seconds"] > 0
    times = told(capsys, "ops", str(MODELS / "mixtral.py"), "--plan", "dp=2", "--cluster", A100)["times"]
    assert times["kinds"]["_grouped_mm"] > 0 and times["kept"] > 0


def test_what_depends_on_values_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(MODELS / "deepseek_v3.py"), "--plan", "tp=2", "--cluster", A100]) == 2
    assert "cannot be told without running it" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "profile", "show"])
def test_several_plans_where_one_is_asked_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, MLP, "--plan", "dp=2;tp=2"]) == 2
    assert "more than one plan" in capsys.readouterr().err


def test_links_that_cannot_be_written_are_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "-o", "/nowhere/links.json"]) == 2
    assert "/nowhere/links.json cannot be written" in capsys.readouterr().err


def test_a_damaged_profile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.db"
    path.write_text("something else")
    assert main(["simulate", MLP, "--plan", "dp=2", "--profile", str(path)]) == 2
    assert "damaged" in capsys.readouterr().err


def test_sequences_end_where_the_table_of_positions_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", GPT, "--plan", "dp=2", "--cluster", A100, "--largest", "sequence"]) == 2
    assert "positions.weight has 16 rows, and position 31 is looked up" in capsys.readouterr().err
    text = Path(GPT).read_text().replace("nn.Embedding(LENGTH, WIDTH)", "nn.Embedding(5 * LENGTH, WIDTH)")
    path = tmp_path / "longer.py"
    path.write_text(text)
    found = told(capsys, "simulate", str(path), "--plan", "dp=2", "--cluster", A100, "--largest", "sequence")
    assert (found["size"], found["next"]) == (80, 96) and "positions.weight has 80 rows" in found["why"]


def test_a_batch_that_nobody_looked_beyond(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", MLP, "--plan", "dp=2", "--cluster", A100, "--largest", "batch"]) == 0
    assert "more than 65,536 times the example was not tried" in capsys.readouterr().out


def test_groups_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(Path(__file__).parents[2] / "examples" / "models" / "mixtral.py")
    (row,) = told(capsys, "simulate", model, "--plan", "dp=2", "--cluster", A100)["plans"]
    assert row["fits"] and row["seconds"] > 0

"""A program as it lies in a directory: as emitted, edited, stale, broken; each said, and judged by its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from weft.cli import main
from weft.errors import PlanError, RunError
from weft.runtime.program.files import CONSTANTS, PARTS, PROGRAM, changes
from weft.verify import verify_program
from weft.verify.program_dir import open_directory

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlp.py"
GPT = EXAMPLE.with_name("gpt.py")


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    found = {}
    for plan in ("dp=2", "tp=2"):
        folder = tmp_path_factory.mktemp("emitted") / "program"
        assert main(["show", str(EXAMPLE), "--plan", plan, "--out", str(folder)]) == 0
        found[plan] = {path.name: path.read_bytes() for path in folder.iterdir()}
    return found


@pytest.fixture
def place(tmp_path: Path, emitted: dict[str, dict[str, bytes]]):
    """Writes a program, with one text replaced by another in `program.py`."""

    def put(plan: str = "dp=2", old: str = "", new: str = "") -> Path:
        folder = tmp_path / "program"
        folder.mkdir()
        for name, content in emitted[plan].items():
            (folder / name).write_bytes(content)
        text = (folder / "program.py").read_text()
        assert text.count(old) >= 1, text
        if old:
            (folder / "program.py").write_text(text.replace(old, new, 1))
        return folder

    return put


def test_as_emitted(place, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place()
    assert main(["verify", str(EXAMPLE), "--program", str(folder), "--json"]) == 0
    captured = capsys.readouterr()
    assert "is as emitted" in captured.err + captured.out
    said = json.loads(captured.out.strip().splitlines()[-1])
    assert said["equal"] and said["program"] == {"directory": str(folder), "edited": [], "stale": []}


def test_a_print_changes_no_number(place, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place("dp=2", "        gelu = F.gelu(", '        print("rank", self.place.rank)\n        gelu = F.gelu(')
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert main(["verify", str(EXAMPLE), "--program", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "is edited (program.py)" in out.splitlines()[0] and "rank 1" in out and "equal to one device" in out
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_two_calls_made_one(place) -> None:
    folder = place()
    lines = (folder / "program.py").read_text().splitlines(keepends=True)
    gelu = next(i for i, line in enumerate(lines) if " gelu = F.gelu(up)" in line)
    assert " up = linear(x, " in lines[gelu - 1]
    lines[gelu - 1 : gelu + 1] = [
        "        gelu = F.gelu(torch.addmm(self.model.up.bias, x, self.model.up.weight.t()))\n"
    ]
    (folder / "program.py").write_text("".join(lines))
    found = verify_program(EXAMPLE, program=folder)
    assert found.equal and found.summary["program"]["edited"] == ["program.py"]


def test_a_changed_operator(place, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place("dp=2", "F.gelu(", "F.relu(")
    assert main(["verify", str(EXAMPLE), "--program", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "different from one device" in out and "the fault is in forward" in out and "down.weight" in out


def test_a_sum_left_out_is_found_at_its_parameter(place) -> None:
    folder = place("dp=2", '"up.weight": Part((32, 16), sync="dp")', '"up.weight": Part((32, 16))')
    found = verify_program(EXAMPLE, program=folder)
    assert not found.equal and found.first_difference is not None
    assert found.first_difference.tensor == "up.weight" and "backward" in found.first_difference.note
    assert any("up.weight" in text for text in found.disagreements)


def test_an_all_reduce_left_out(place) -> None:
    folder = place("tp=2", "self.comm.all_reduce(", "(lambda x, over: x)(")
    assert not verify_program(EXAMPLE, program=folder).equal


def test_an_error_of_syntax_is_told_with_its_line(place) -> None:
    folder = place("dp=2", "F.gelu(up)", "F.gelu(up")
    line = next(i for i, text in enumerate((folder / "program.py").read_text().splitlines(), 1) if "F.gelu(up" in text)
    with pytest.raises(RunError, match="cannot be loaded: SyntaxError") as caught:
        verify_program(EXAMPLE, program=folder)
    assert caught.value.place.startswith(f"{folder}/program.py:{line}") and "mend" in caught.value.remedy


@pytest.mark.parametrize("processes", [False, True])
def test_an_error_while_it_runs_is_told_with_its_line(place, processes: bool) -> None:
    folder = place("dp=2", "F.gelu(up)", "F.gelu(yy)")
    with pytest.raises(RunError, match="NameError: name 'yy' is not defined") as caught:
        verify_program(EXAMPLE, program=folder, processes=processes)
    assert "program.py:" in caught.value.place and "F.gelu(yy)" in caught.value.place


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('y, over="tp"', 'y, over="zz"', 'y, over="zz"'),
        ('{0: "tp"}', '{0: "zz"}', "class "),
        ('{0: "tp"}', '{0: "tp"}, sync="zz"', "class "),
    ],
)
def test_an_axis_that_is_none_is_told(place, old: str, new: str, line: str) -> None:
    folder = place("tp=2", old, new)
    with pytest.raises(RunError, match="the grid has no axis 'zz'; its axes are tp of 2") as caught:
        verify_program(EXAMPLE, program=folder)
    assert "program.py:" in caught.value.place and line in caught.value.place and caught.value.remedy


def test_an_edit_of_equal_size_within_a_second_is_seen(place) -> None:
    folder = place()
    assert verify_program(EXAMPLE, program=folder).equal
    path = folder / "program.py"
    path.write_text(path.read_text().replace("F.gelu(", "F.relu("))
    assert not verify_program(EXAMPLE, program=folder).equal


def test_on_processes(place) -> None:
    folder = place("tp=2", "        gelu = F.gelu(", "        up = up + 0\n        gelu = F.gelu(")
    found = verify_program(EXAMPLE, program=folder, processes=True)
    assert found.equal and found.processes is not None and found.processes.equal_bits


def test_another_number_of_devices(place) -> None:
    with pytest.raises(PlanError, match="for 2 devices, 3 were asked for"):
        verify_program(EXAMPLE, program=place(), devices=3)


@pytest.mark.parametrize("name", ["program.py", PARTS])
def test_a_missing_file(place, name: str) -> None:
    folder = place()
    (folder / name).unlink()
    assert changes(folder) == {name: "missing"}
    with pytest.raises(RunError, match=f"lacks {name}"):
        open_directory(folder)


@pytest.mark.parametrize("name", ["program.py", PARTS, PROGRAM])
def test_a_truncated_file(place, name: str) -> None:
    folder = place()
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 3])
    with pytest.raises(RunError, match=r"cannot be (read|loaded)"):
        verify_program(EXAMPLE, program=folder)


@pytest.mark.parametrize("key", ["batch", "size_of", "sizes", "events", "devices"])
@pytest.mark.parametrize("value", [None, "gone"])
def test_a_description_that_lacks_something(place, key: str, value: str | None) -> None:
    folder = place()
    about = json.loads((folder / PROGRAM).read_text())
    about = {name: one for name, one in about.items() if name != key or value is None} | ({} if value else {key: None})
    (folder / PROGRAM).write_text(json.dumps(about))
    with pytest.raises(RunError, match=f"{PROGRAM} cannot be read"):
        open_directory(folder)
    (folder / "meta.json").write_text("{}")
    with pytest.raises(RunError, match="older version"):
        open_directory(folder)


def test_tables_that_lack_something(place) -> None:
    folder = place()
    (folder / PARTS).write_text("{}")
    with pytest.raises(RunError, match=f"{PARTS} cannot be read"):
        open_directory(folder)


def test_broken_constants(place) -> None:
    folder = place()
    (folder / CONSTANTS).write_bytes(b"nothing that torch saved")
    assert changes(folder) == {CONSTANTS: "edited"}
    with pytest.raises(RunError, match=f"{CONSTANTS} cannot be read"):
        open_directory(folder)


def test_strangers(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no directory"):
        open_directory(tmp_path / "none")
    with pytest.raises(RunError, match="no program of weft's"):
        open_directory(tmp_path)
    (tmp_path / PROGRAM).write_text("[]")
    with pytest.raises(RunError, match="no program of weft's"):
        open_directory(tmp_path)


def test_of_another_model(place) -> None:
    with pytest.raises(PlanError, match=r"another model or example: it stores up\.weight, which the model has not"):
        verify_program(GPT, program=place())


def test_stale_but_fitting_is_verified_and_said(place, tmp_path: Path) -> None:
    changed = tmp_path / "mlp.py"
    changed.write_text(EXAMPLE.read_text().replace("functional.gelu", "functional.relu"))
    told: list[str] = []
    found = verify_program(changed, program=place(), tell=told.append)
    assert not found.equal and "stale: made from another state of the model" in told[0]
    assert found.summary["program"]["stale"] == ["another state of the model"]


def test_stale_with_other_shapes_is_refused(place, tmp_path: Path) -> None:
    changed = tmp_path / "mlp.py"
    changed.write_text(EXAMPLE.read_text().replace("hidden=32", "hidden=48"))
    with pytest.raises(PlanError, match=r"it stores up.weight as \[32, 16\], the model has \[48, 16\]"):
        verify_program(changed, program=place())


def test_another_batch_is_refused(place, tmp_path: Path) -> None:
    changed = tmp_path / "mlp.py"
    changed.write_text(EXAMPLE.read_text().replace("(12, 16)", "(8, 16)"))
    with pytest.raises(PlanError, match=r"takes .* as \[12, 16\] of float32, the example has \[8, 16\]"):
        verify_program(changed, program=place())


def test_made_by_another_torch(place) -> None:
    folder = place()
    meta = json.loads((folder / PROGRAM).read_text())
    meta["made_from"]["torch"] = "1.0"
    (folder / PROGRAM).write_text(json.dumps(meta))
    told: list[str] = []
    assert verify_program(EXAMPLE, program=folder, tell=told.append).equal
    assert told[0].endswith("stale: made from torch 1.0") and torch.__version__ != "1.0"


@pytest.mark.parametrize("given", [[], ["--plan", "dp=2", "--program", "x"]])
def test_the_command_wants_one_of_two(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(EXAMPLE), *given]) == 2
    assert "--plan" in capsys.readouterr().err


def test_links_are_for_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(EXAMPLE), "--program", "x", "--links", "y"]) == 2
    assert "leave out --links" in capsys.readouterr().err

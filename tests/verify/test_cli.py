"""The command: exit codes, what is said, and that no stack trace gets out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from weft.cli import main
from weft.commands import verify as command
from weft.errors import PlanError
from weft.verify.compare import LARGEST, Difference, FirstDifference, Result

EQUAL = Result(
    equal=True,
    largest_difference=2e-16,
    differences=tuple(Difference(kind, 2e-16, "w") for kind in ("loss", "gradients", "weights")),
    tolerance=1e-9,
    devices=2,
    rounding=(Difference("loss", 3e-7, "loss of step 1"),),
    summary={
        "operators": 5,
        "axes": {"dp": {"size": 2, "cut": 4, "kinds": {"linear": 4}}},
        "proven": "7 sums complete",
    },
)
DIFFERENT = Result(
    equal=False,
    largest_difference=0.25,
    differences=(Difference("loss", 0.25, "loss of step 1"),),
    tolerance=1e-9,
    devices=2,
    first_difference=FirstDifference("up/linear", "linear", "net.py:7  y = self.up(x)", 0.5),
    disagreements=("weight up.bias: rank 1 differs from the ranks before it",),
)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch):
    """Makes the command's `verify` return or raise what it is given."""

    def answer(with_what: Result | BaseException) -> None:
        def fake(*args: object, **kwargs: object) -> Result:
            if isinstance(with_what, BaseException):
                raise with_what
            return with_what

        monkeypatch.setattr(command, "verify", fake)

    return answer


def test_equal(answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers(EQUAL)
    assert main(["verify", "net.py", "--plan", "dp=2", "--json"]) == 0
    out = capsys.readouterr().out
    assert "equal to one device" in out and "dp=2 cuts 4 of them: 4 linear" in out and "7 sums complete" in out
    said = json.loads(out.strip().splitlines()[-1])
    assert said["equal"] is True and said["largest_difference"] == 2e-16 and said["rounding"] == {"loss": 3e-7}


def test_different(answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers(DIFFERENT)
    assert main(["verify", "net.py", "--plan", "dp=2", "--json"]) == 1
    out = capsys.readouterr().out
    assert "different from one device" in out and "equal to one device" not in out
    assert "up/linear" in out and "net.py:7  y = self.up(x)" in out and "up.bias: rank 1" in out
    assert json.loads(out.strip().splitlines()[-1])["equal"] is False


def test_without_json_nothing_looks_like_it(answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers(EQUAL)
    assert main(["verify", "net.py", "--plan", "dp=2"]) == 0
    assert "{" not in capsys.readouterr().out


def test_user_errors_have_no_stack_trace(answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers(PlanError("no name 'q' in [up]", place="net.py:7", remedy="cut 'k'"))
    assert main(["verify", "net.py", "--plan", "dp=2"]) == 2
    err = capsys.readouterr().err
    assert "no name 'q' in [up]" in err and "at: net.py:7" in err and "try: cut 'k'" in err
    assert "Traceback" not in err


def test_our_own_faults_are_told_as_such(answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers(AssertionError("two parts overlap"))
    assert main(["verify", "net.py", "--plan", "dp=2"]) == 2
    err = capsys.readouterr().err
    assert "two parts overlap" in err and "fault in Weft" in err and "Traceback" not in err


def test_debug_lets_the_trace_out(answers) -> None:
    answers(PlanError("no"))
    with pytest.raises(PlanError):
        main(["verify", "net.py", "--plan", "dp=2", "--debug"])


def test_missing_model_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "absent.py"), "--plan", "dp=2"]) == 2
    assert "no model file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["verify"], ["verify", "net.py"], ["verify", "net.py", "--plan", "p", "--devices", "0"]]
)
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and f"  at: {' '.join(('weft', *argv))}\n  try: " in err


def test_long_lists_are_cut_short(answers, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {f"kind{number}": 1 for number in range(9)}
    answers(replace(EQUAL, summary={"operators": 9, "axes": {"dp": {"size": 2, "cut": 9, "kinds": kinds}}}))
    assert main(["verify", "net.py", "--plan", "dp=2"]) == 0
    out = capsys.readouterr().out
    assert "1 kind4 and 4 more kinds" in out and "kind5" not in out
    assert main(["verify", "net.py", "--plan", "dp=2", "--all"]) == 0
    assert "1 kind7, 1 kind8\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "told"),
    {
        "tarin net.py --plan dp=2": "did you mean 'train'?",
        "train net.py --plan dp=2 --stpes 3": "did you mean '--steps'?",
        "train net.py --plna dp=2": "did you mean '--plan'?",
        "train net.py --plan dp=2 -steps 3": "did you mean '--steps'?",
        "train net.py --plan dp=2 --schedule cosin": "did you mean 'cosine'?",
        "show net.py --memroy --plan dp=2": "did you mean '--memory'?",
        "completion bsh": "did you mean 'bash'?",
        "train net.py": "--plan dp=2 (each device takes half of the batch)",
        "verify net.py": "or --program DIR",
        "show net.py --devices 2": "plan.yaml",
    }.items(),
)
def test_what_is_misspelt_or_missing(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_options_may_be_cut_short(answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers(EQUAL)
    assert main(["verify", "net.py", "--pl=dp=2", "--devices", "2", "--seed", "-1"]) == 0


@pytest.mark.parametrize(("plan", "told"), [("pd=2", "'dp'"), ("t=2", "'tp'"), ("dp=2,zreo=1", "'zero'")])
def test_misspelt_settings(plan: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(Path(__file__).parents[2] / "examples" / "mlp.py"), "--plan", plan]) == 2
    assert f"did you mean {told}?" in capsys.readouterr().err


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_errors_are_json_too(answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers(PlanError("no name 'q' in [up]", place="net.py:7", remedy="cut 'k'"))
    assert main(["verify", "net.py", "--plan", "dp=2", "--json"]) == 2
    assert last_line(capsys) == {"error": "no name 'q' in [up]", "at": "net.py:7", "try": "cut 'k'"}
    answers(AssertionError("two parts overlap"))
    assert main(["verify", "net.py", "--plan", "dp=2", "--json"]) == 2
    assert last_line(capsys)["error"] == "AssertionError: two parts overlap"
    assert main(["verify", "net.py", "--json"]) == 2
    assert last_line(capsys)["error"] == "weft verify needs a plan"


def test_what_the_user_prints_does_not_break_json(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fake(*args: object, **kwargs: object) -> Result:
        print("in forward", end="")
        return EQUAL

    monkeypatch.setattr(command, "verify", fake)
    assert main(["verify", "net.py", "--plan", "dp=2", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1])["equal"] is True
    assert "in forward" in told.err and "in forward" not in told.out


def test_interrupted(answers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # ranks of other tests may still be there: the command would leave the process over them
    monkeypatch.setattr("weft.cli._leave", lambda: None)
    answers(KeyboardInterrupt())
    assert main(["verify", "net.py", "--plan", "dp=2"]) == 130
    told = capsys.readouterr()
    assert told.err.strip().splitlines()[-1] == "interrupted" and "Traceback" not in told.err and not told.out


def test_long_names_stay_whole_and_infinity_has_a_name(answers, capsys: pytest.CaptureFixture[str]) -> None:
    name = "encoder.layers." + "very_long_module_name." * 20 + "weight"
    found = replace(
        DIFFERENT,
        largest_difference=LARGEST,
        differences=(Difference("gradients", LARGEST, name),),
        first_difference=FirstDifference("", name, "", LARGEST, "a note", "a remedy"),
    )
    answers(found)
    assert main(["verify", "net.py", "--plan", "dp=2", "--json"]) == 1
    out = capsys.readouterr().out
    assert f"gradients  infinite            {name}\n" in out and "…" not in out and "e+308" not in out
    assert "try: a remedy" in out and all(line == line.rstrip() for line in out.splitlines())
    said = json.loads(out.splitlines()[-1])
    assert said["largest_difference"] == "infinite" == said["differences"]["gradients"]["value"]
    assert said["first_difference"]["difference"] == "infinite"

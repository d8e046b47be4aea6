"""What is no precision, or does not fit the model: an error of ours each, with what to do, wherever it is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.acceptance.test_bad_state import refused
from weft.cli import main
from weft.compile.model_file import load_model_file
from weft.errors import CaptureError, ModelFileError, RunError, WeftError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(x)).square().mean()


EXAMPLE = torch.ones(4, 6)

FILE = """
import torch
import weft
from torch import nn


class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


def model():
    return Net(6, 4)


def example():
    return torch.ones(4, 6)


def precision():
    return PRECISION
"""


def parallel(precision: Any) -> Any:
    return weft.parallelize(Net(), EXAMPLE, plan="dp=2", emulate=True, cache=None, precision=precision)


BAD: dict[str, tuple[Callable[[], Any], str, str]] = {
    "an integer dtype": (lambda: weft.Precision(torch.int8), "torch.int8 is no float dtype to compute in", "bf16"),
    "a word": (lambda: weft.Precision("bf17"), "'bf17' is no float dtype to compute in", "bf16"),  # type: ignore[arg-type]
    "no dtype": (lambda: weft.Precision(None), "None is no float dtype to compute in", "bf16"),  # type: ignore[arg-type]
    "a list": (lambda: weft.Precision([]), "[] is no float dtype to compute in", "bf16"),  # type: ignore[arg-type]
    "integers added up over ranks": (
        lambda: weft.Precision(reduce=torch.int8),
        "reduce=torch.int8 is no float dtype to add up gradients in",
        "None",
    ),
    "complex numbers added up": (
        lambda: weft.Precision(accumulate=torch.complex64),
        "accumulate=torch.complex64 is no float dtype to add up gradients in",
        "None",
    ),
    "keep a number": (lambda: weft.Precision(keep=3), "keep=3", 'keep=("norm.*",'),  # type: ignore[arg-type]
    "keep numbers": (lambda: weft.Precision(keep=[3]), "keep=[3]", 'keep=("norm.*",'),  # type: ignore[arg-type]
    "keep what is not there": (
        lambda: parallel(weft.Precision(keep="norms.*")),
        "no parameter is named norms.*",
        "norm.weight",
    ),
    "keep all": (lambda: parallel(weft.Precision(keep="*")), "keep=('*',) leaves no parameter", "keep fewer"),
    "wider than the model": (lambda: parallel("fp64"), "wider than norm.weight itself", "model.double()"),
    "a number for parallelize": (lambda: parallel(3), "3 is no float dtype to compute in", "bf16"),
}


@pytest.mark.parametrize("case", BAD)
def test_python(case: str) -> None:
    error = refused(*BAD[case], kind=RunError)
    assert "test_bad_precision.py:" in error.place, error
    if "keep" in case:
        assert "compute=" not in error.remedy, error


def test_of_capture_and_verify() -> None:
    with pytest.raises(CaptureError, match="no float dtype") as raised:
        weft.capture(Net(), EXAMPLE, precision=torch.int8)  # type: ignore[arg-type]
    assert "test_bad_precision.py:" in raised.value.place and "bf16" in raised.value.remedy
    with pytest.raises(RunError, match="no float dtype") as refused:
        weft.verify(Net(), EXAMPLE, plan="dp=2", precision="bf17")
    assert refused.value.place == "precision 'bf17'" and "bf16" in refused.value.remedy


@pytest.mark.parametrize(
    ("said", "kind", "message", "place"),
    [
        ("'bf17'", ModelFileError, "'bf17' is no float dtype to compute in", "net.py, precision()"),
        ("13", ModelFileError, "13 is no float dtype to compute in", "net.py, precision()"),
        ("weft.Precision(torch.int8)", RunError, "torch.int8 is no float dtype", "net.py:21"),
        ("weft.Precision(keep='up.*')", ModelFileError, "no parameter is named up.*", "net.py, precision()"),
    ],
)
def test_of_a_model_file(said: str, kind: type[WeftError], message: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(FILE.replace("PRECISION", said))
    with pytest.raises(kind) as raised:
        load_model_file(path)
    assert message in raised.value.message and place in raised.value.place and raised.value.remedy, raised.value


@pytest.mark.parametrize("command", ["verify", "show", "train"])
def test_of_a_command(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.py"
    path.write_text(FILE.replace("PRECISION", "None"))
    assert main([command, str(path), "--plan", "dp=2", "--precision", "bf17"]) == 2
    told = capsys.readouterr().err
    assert "'bf17' is no float dtype to compute in" in told and "at: precision 'bf17'" in told and "bf16" in told


def test_what_is_right() -> None:
    assert weft.Precision("bf16") == weft.Precision(torch.bfloat16) == weft.Precision()  # type: ignore[arg-type]
    assert weft.Precision(keep="norm.*") == weft.Precision(keep=["norm.*"])  # type: ignore[arg-type]

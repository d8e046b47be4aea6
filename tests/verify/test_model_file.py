"""Model files: what they give, and what is said about bad ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from weft.compile.model_file import adamw, check_loss, load_model_file
from weft.errors import ModelFileError

GOOD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x).mean()

def model():
    return Net()

def example():
    return (torch.ones(2, 3),)
"""


def write(folder: Path, text: str, name: str = "net.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_good_file(tmp_path: Path) -> None:
    before, paths = set(sys.modules), list(sys.path)
    subject = load_model_file(write(tmp_path, GOOD))
    assert type(subject.model).__name__ == "Net"
    assert subject.example[0].shape == (2, 3)
    assert subject.optimizer is adamw and subject.batch_dims is None
    assert set(sys.modules) == before and sys.path == paths


def test_optional_functions_and_neighbouring_modules(tmp_path: Path) -> None:
    write(tmp_path, "RATE = 0.5\n", "weft_test_neighbour.py")
    more = """
from weft_test_neighbour import RATE

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=RATE)

def batch_dims():
    return {"x": 1}
"""
    subject = load_model_file(write(tmp_path, GOOD + more))
    made = subject.optimizer(subject.model.parameters())
    assert isinstance(made, torch.optim.SGD) and made.defaults["lr"] == 0.5
    assert subject.batch_dims == {"x": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def model(:\n", "the file raised SyntaxError"),
        ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
        ("def example():\n    return ()\n", "has no model()"),
        (GOOD.replace("def example", "def sample"), "has no example()"),
        (GOOD.replace("return Net()", "return 3"), "model() returned a int, not an nn.Module"),
        (GOOD.replace("return Net()", "return Net"), "not an nn.Module"),
        (GOOD.replace("return (torch.ones(2, 3),)", "return [1]"), "example() returned a list"),
        (GOOD.replace("return (torch.ones(2, 3),)", "return None"), "example() returned None"),
        (GOOD.replace("return Net()", "return Net(7)"), "model() raised TypeError"),
        (GOOD + "def batch_dims():\n    return 1\n", "batch_dims() returned a int"),
        (GOOD.replace("def model():\n    return Net()", "model = 3"), "model in"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        load_model_file(write(tmp_path, text))
    assert said in caught.value.message


def test_the_users_own_line_is_shown(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("torch.ones(2, 3)", "torch.ones(2, 3).reshape(7)"))
    with pytest.raises(ModelFileError) as caught:
        load_model_file(path)
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "reshape(7)" in text)
    assert f"net.py:{line}" in caught.value.place and "reshape(7)" in caught.value.place
    with pytest.raises(ModelFileError) as caught:
        load_model_file(write(tmp_path, "\n\ndef model(:\n"))
    assert caught.value.place.endswith("net.py:3")


def test_missing_file_and_wrong_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no model file"):
        load_model_file(tmp_path / "absent.py")
    with pytest.raises(ModelFileError, match="not a Python file"):
        load_model_file(write(tmp_path, "", "model.txt"))


class Output:
    def __init__(self, loss: object) -> None:
        self.loss = loss


def test_where_the_loss_is_found() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    for output in (loss, Output(loss), {"logits": 1, "loss": loss}, (loss, 3)):
        assert check_loss(output, "net.py") is loss


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (torch.ones(2, 3), r"a Tensor of shape \[2, 3\]"),
        (torch.ones(()), "depends on no trained parameter"),
        (Output(None), "a Output"),
        (None, "None"),
        ({"logits": torch.ones(2)}, "a dict"),
        ((), "a tuple"),
    ],
)
def test_no_loss(output: object, said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        check_loss(output, "net.py")

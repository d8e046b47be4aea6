"""`weft train`: what it says, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.train.eager import STEPS
from weft.cli import main
from weft.compile.model_file import load_model_file
from weft.errors import PlanError, WeftError
from weft.runtime.random import Stream
from weft.train.command import train_file
from weft.train.data import Own
from weft.train.settings import Settings
from weft.verify.draw_mode import DrawMode

ROOT = Path(__file__).parents[2]
MLP = str(ROOT / "examples" / "mlp.py")

FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x).square().mean()

def model():
    torch.manual_seed(0)
    return Net()

def example():
    return torch.ones(4, 4)
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are kept in the working directory: not in this one."""
    monkeypatch.chdir(tmp_path)


def write(folder: Path, more: str) -> str:
    path = folder / "net.py"
    path.write_text(FILE + more)
    return str(path)


def test_it_trains_as_the_eager_model_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", MLP, "--plan", "dp=2", "--steps", str(STEPS), "--lr", "0.01", "--json"]) == 0
    out = capsys.readouterr().out
    assert "step 1  loss " in out and f"{STEPS} steps, " in out and "on 2 processes" in out
    said = json.loads(out.strip().splitlines()[-1])
    subject = load_model_file(MLP)
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        with DrawMode(Stream(0, step, 0)):
            loss = subject.model(**subject.example)
        assert said["losses"][step] == pytest.approx(loss.item(), rel=1e-5)
        loss.backward()
        optimizer.step()
    assert said["loss_from"] == said["losses"][0] and said["loss_to"] == said["losses"][-1]
    assert said["steps"] == STEPS and said["devices"] == 2 and said["replicas"] == 1 and said["steps_per_second"] > 0


def test_an_edited_program_is_told_and_run_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "")
    train = ["train", path, "--plan", "dp=1", "--steps", "1", "--json"]
    assert main(train) == 0
    first = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["loss_from"]
    (program,) = (tmp_path / ".weft").glob("*/program.py")
    program.write_text(program.read_text().replace("return self.finish(mean", "return 3 * self.finish(mean"))
    assert main(train) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.strip().splitlines()[-1])["loss_from"] == pytest.approx(3 * first)
    assert captured.err.count("was edited and is run as it is") == 1
    assert f"weft verify {path} --program" in captured.err
    program.unlink()
    assert main(train) == 2
    assert "lacks program.py" in capsys.readouterr().err


def test_data_is_shared_out_to_replicas(tmp_path: Path) -> None:
    path = write(tmp_path, "def data():\n    return [torch.full((4, 4), float(i)) for i in range(4)]\n")
    subject = load_model_file(path)
    dealt = [Own(subject).batches(replica, 2) for replica in (0, 1)]
    firsts = [[next(batches)[0, 0].item() for _ in range(3)] for batches in dealt]
    assert firsts == [[0.0, 2.0, 0.0], [1.0, 3.0, 1.0]]
    trained = train_file(path, "dp=1", Settings(steps=2, devices=2))
    assert trained.replicas == 2 and trained.devices == 2
    eager = [subject.model(batch).item() for batch in list(subject.data())[:2]]
    assert trained.losses[0] == pytest.approx(sum(eager) / 2, rel=1e-5)


def test_a_rank_that_fails_ends_all_with_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "def data():\n    yield example()\n    raise ValueError('no more')\n")
    assert main(["train", path, "--plan", "dp=2", "--steps", "3"]) == 2
    err = capsys.readouterr().err
    assert "rank 0 failed" in err and "no more" in err and "Traceback" not in err


def test_the_wrong_number_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", MLP, "--plan", "dp=2", "--devices", "3"]) == 2
    assert "a multiple of 2" in capsys.readouterr().err


def test_a_loss_that_is_no_number_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "def data():\n    yield torch.full((4, 4), float('inf'))\n")
    assert main(["train", path, "--plan", "dp=1"]) == 2
    assert "the loss is nan in step 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "terminated", marks=pytest.mark.full),
    ],
)
def test_signals_end_all(number: signal.Signals, code: int, word: str, tmp_path: Path) -> None:
    mark = tmp_path / "running"
    more = f"def data():\n    while True:\n        yield example()\n        open({str(mark)!r}, 'w').close()\n"
    argv = [sys.executable, "-m", "weft.cli", "train", write(tmp_path, more), "--plan", "dp=2", "--steps", "1000000"]
    process = subprocess.Popen(
        argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        until = time.monotonic() + 60
        while not mark.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        # Ctrl-C reaches all processes of a terminal, what a scheduler sends only the first
        os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code and word in err
    assert "Traceback" not in err and "c10d" not in err, err


@pytest.mark.full
def test_an_optimizer_that_mixes_elements_is_refused_on_cut_parameters(tmp_path: Path) -> None:
    more = "\ndef optimizer(parameters):\n    return torch.optim.Adafactor(parameters, lr=0.1)\n"
    path = write(tmp_path, more)
    wide = "nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))"
    Path(path).write_text(Path(path).read_text().replace("nn.Linear(4, 1)", wide))
    with pytest.raises(PlanError, match=r"Adafactor mixes the elements .* layer"):
        train_file(path, "tp=2", Settings(steps=1))
    # another optimizer is asked for
    train_file(path, "tp=2", Settings(steps=1, lr=0.1))


@pytest.mark.full
def test_an_optimizer_over_other_parameters_is_refused(tmp_path: Path) -> None:
    more = "\ndef optimizer(parameters):\n    return torch.optim.SGD(Net().parameters(), lr=0.1)\n"
    with pytest.raises(WeftError, match=r"updates 2 tensors that are not among"):
        train_file(write(tmp_path, more), "dp=2", Settings(steps=1))

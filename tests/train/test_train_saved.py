"""Saved runs: going on is as never having stopped; what is not a saved run is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from weft.compile.model_file import load_model_file
from weft.errors import WeftError
from weft.runtime.jobs.launch import Pool
from weft.train.command import train_file
from weft.train.saved import open_saved
from weft.train.settings import Settings, Trained

FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, idx, targets):
        self.seen += 1
        x = self.table(idx)
        x = x + self.drop(self.down(torch.relu(self.up(x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

def model():
    torch.manual_seed(0)
    return Net().double()

def data():
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        tokens = torch.randint(12, (4, 7), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]

def example():
    return next(data())
"""
HOW = {"lr": 1e-2, "schedule": "constant", "warmup": 1, "clip": 1.0}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "net.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def two_steps(path: Path, pool: Pool) -> Path:
    """Two steps under dp=2, saved."""
    train(path, pool, "dp=2", steps=2, save=str(path.parent / "two"))
    return path.parent / "two"


def train(path: Path, pool: Pool, plan: str, **settings: object) -> Trained:
    return train_file(path, plan, Settings(**{**HOW, **settings}), pool=pool)  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, torch.Tensor]:
    found = open_saved(folder).folder
    return {**load_file(found / "model.safetensors"), **load_file(found / "optimizer.safetensors")}


@pytest.fixture(scope="module")
def through(path: Path, pool: Pool) -> tuple[Trained, dict[str, torch.Tensor]]:
    """Four steps without a stop."""
    folder = path.parent / "through"
    return train(path, pool, "dp=2", steps=4, save=str(folder), save_every=3), files(folder)


def test_the_same_plan_goes_on_bit_for_bit(path: Path, pool: Pool, two_steps: Path, through) -> None:
    folder = path.parent / "same"
    shutil.copytree(two_steps, folder)
    trained = train(path, pool, "dp=2", steps=4, resume=str(folder), save=str(folder))
    assert trained.start == 2 and trained.losses == through[0].losses[2:]
    found = files(folder)
    assert found.keys() == through[1].keys()
    assert all(torch.equal(tensor, through[1][name]) for name, tensor in found.items())
    # the old state is gone when the new one is there
    assert sorted(one.name for one in folder.iterdir()) == ["latest.json", "step-4"]


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=3"])
def test_another_plan_goes_on_to_rounding(path: Path, pool: Pool, two_steps: Path, through, plan: str) -> None:
    folder = path.parent / plan.replace(",", "-")
    trained = train(path, pool, plan, steps=4, resume=str(two_steps), save=str(folder))
    assert trained.losses == pytest.approx(through[0].losses[2:], rel=1e-11)
    found = files(folder)
    assert found.keys() == through[1].keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, through[1][name], rtol=1e-9, atol=1e-11)


def test_another_schedule_is_told(path: Path, pool: Pool, two_steps: Path) -> None:
    told: list[str] = []
    how = Settings(**{**HOW, "steps": 3, "schedule": "linear", "resume": str(two_steps)})  # type: ignore[arg-type]
    train_file(path, "dp=2", how, pool=pool, tell=told.append)
    assert any("goes on linear over 3 steps" in text for text in told)


def test_it_is_the_state_dict_of_the_model(path: Path, two_steps: Path) -> None:
    model = load_model_file(path).model
    model.load_state_dict(load_file(open_saved(two_steps).model), strict=True)
    assert model.seen == 2 and torch.equal(model.head.weight, model.table.weight)


def refused(two_steps: Path, tmp_path: Path, path: Path, pool: Pool, **settings: object) -> str:
    with pytest.raises(WeftError) as caught:
        train(path, pool, "dp=2", **{"steps": 4, "resume": str(tmp_path / "run"), **settings})
    return str(caught.value)


def test_what_is_no_saved_run_is_told(two_steps: Path, tmp_path: Path, path: Path, pool: Pool) -> None:
    given = (two_steps, tmp_path, path, pool)
    run = tmp_path / "run"
    assert "no saved run" in refused(*given)
    shutil.copytree(two_steps, run)
    assert "has done 2 steps" in refused(*given, steps=2)
    assert "had the seed 0, this one has 5" in refused(*given, seed=5)
    other = tmp_path / "net.py"
    other.write_text(FILE.replace("12, 8)", "12, 6)").replace("(8, 12", "(6, 12"))
    assert "the saved run is of another model: " in refused(two_steps, tmp_path, other, pool)
    other.write_text(FILE + "\ndef optimizer(parameters):\n    return torch.optim.SGD(parameters, lr=0.1)\n")
    assert "had the optimizer 'AdamW', this one has 'SGD'" in refused(two_steps, tmp_path, other, pool, lr=None)
    for name in ("model.safetensors", "optimizer.safetensors", "training.json"):
        whole = (run / "step-2" / name).read_bytes()
        (run / "step-2" / name).write_bytes(whole[: len(whole) // 2])
        assert f"{name} is cut short" in refused(*given)
        (run / "step-2" / name).unlink()
        assert name in refused(*given)
        (run / "step-2" / name).write_bytes(whole)
    (run / "latest.json").write_text(json.dumps({"format": "another", "folder": "step-2"}))
    assert "latest.json is cut short, or no part of a saved run" in refused(*given)


def test_a_run_that_was_killed_leaves_the_old_state(path: Path, pool: Pool, two_steps: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_steps, run)
    # killed while it wrote the next state
    (run / ".partial-step-3").mkdir()
    (run / ".partial-step-3" / "model.safetensors").write_bytes(b"cut")
    assert open_saved(run).progress.step == 2
    train(path, pool, "dp=2", steps=3, resume=str(run), save=str(run))
    assert sorted(one.name for one in run.iterdir()) == ["latest.json", "step-3"]


def test_something_else_is_not_overwritten(path: Path, pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(WeftError, match="holds something else"):
        train(path, pool, "dp=2", save=str(tmp_path))
    with pytest.raises(WeftError, match="is a file"):
        train(path, pool, "dp=2", save=str(tmp_path / "notes"))

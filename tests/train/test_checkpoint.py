"""weft.save and weft.load: going on is as never having stopped, under any plan; what is no such folder is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import weft
from tests.train.ranks import on_ranks
from tests.train.test_two_layouts import net as tied
from tests.train.test_two_layouts import parallel as in_two_layouts

PP = "pp=2,microbatches=1"
"""Micro-batches have draws of their own."""


class Net(nn.Module):
    """Tied weights, dropout, a buffer that forward changes, one that is not saved."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.ones(8), persistent=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        self.seen += 1
        x = self.table(idx) * self.scale
        x = x + nn.functional.dropout(self.down(torch.relu(self.up(x))), 0.2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def net(seed: int = 0, **settings: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**settings).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(12, (4, 7), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


class Run:
    """A loop of the user's own, with a schedule of the rate."""

    def __init__(self, plan: str, model: nn.Module | None = None, seed: int = 7) -> None:
        self.parallel: Any = weft.parallelize(
            net() if model is None else model, batch(0), plan, emulate=plan != "dp=1", cache=None, seed=seed
        )
        self.optimizer = torch.optim.AdamW(self.parallel.parameters(), lr=0.02)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.8)

    def train(self, steps: range) -> dict[str, Tensor]:
        for step in steps:
            self.parallel.train_step(batch(step), self.optimizer)
            self.schedule.step()
        state: dict[str, Tensor] = self.parallel.full_state_dict()
        return state

    def save(self, path: Path) -> None:
        weft.save(path, self.parallel, self.optimizer, schedule=self.schedule.state_dict(), note="x")

    def load(self, path: Path) -> None:
        extra = weft.load(path, self.parallel, self.optimizer)
        assert extra["note"] == "x"
        self.schedule.load_state_dict(extra["schedule"])


@pytest.fixture(scope="module")
def through() -> dict[str, Tensor]:
    """Five steps without a stop."""
    return Run("dp=2").train(range(5))


@pytest.mark.parametrize(
    ("before", "after"), [("dp=2", "dp=2"), ("tp=2", "dp=2,zero=3"), ("dp=2,zero=1", PP), (PP, "dp=1")]
)
def test_going_on_is_as_never_having_stopped(
    before: str, after: str, through: dict[str, Tensor], tmp_path: Path
) -> None:
    first = Run(before)
    first.train(range(3))
    first.save(tmp_path / "run")
    second = Run(after, net(seed=5), seed=1)
    second.train(range(1))  # what was there is replaced
    second.load(tmp_path / "run")
    exact = {"rtol": 0, "atol": 0} if before == after else {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(second.train(range(3, 5)), through, **exact)


def test_the_full_state_dict_is_the_originals() -> None:
    for plan in ("dp=1", "tp=2", PP):
        parallel = Run(plan).parallel
        found, expected = parallel.full_state_dict(), net().state_dict()
        assert list(found) == list(expected)
        torch.testing.assert_close(found, dict(expected))
        net(seed=3).load_state_dict(found)
    if plan != "dp=1":
        ranks = parallel.on_ranks(lambda rank: rank.full_state_dict())
        torch.testing.assert_close(ranks[1], dict(expected))
        ranks = parallel.on_ranks(lambda rank: rank.full_state_dict(rank0_only=True))
        assert list(ranks[0]) == list(expected) and ranks[1] == {}


def test_a_parameter_in_two_layouts_goes_on(tmp_path: Path) -> None:
    def step(module: Any, optimizer: Any) -> None:
        module.train_step(torch.ones(4, 8, dtype=torch.float64), optimizer)

    first, second = in_two_layouts(tied(0)), in_two_layouts(tied(1))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (first, second)]
    step(first, optimizers[0])
    weft.save(tmp_path / "run", first, optimizers[0])
    weft.load(tmp_path / "run", second, optimizers[1])
    for one, optimizer in zip((first, second), optimizers, strict=True):
        step(one, optimizer)
    torch.testing.assert_close(second.full_state_dict(), first.full_state_dict(), rtol=0, atol=0)


def test_several_optimizers_and_weights_alone(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Any, list[torch.optim.Optimizer]]:
        parallel: Any = weft.parallelize(net(seed), batch(0), "dp=2", emulate=True, cache=None)
        matrices = [one for one in parallel.parameters() if one.dim() == 2]
        rest = [one for one in parallel.parameters() if one.dim() != 2]
        return parallel, [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.Adam(rest)]

    (first, theirs), (second, mine) = made(0), made(1)
    first.train_step(batch(0), theirs)
    weft.save(tmp_path / "run", first, theirs)
    weft.load(tmp_path / "run", second, mine)
    for one, optimizers in ((first, theirs), (second, mine)):
        one.train_step(batch(1), optimizers)
    torch.testing.assert_close(second.full_state_dict(), first.full_state_dict(), rtol=0, atol=0)
    weft.save(tmp_path / "alone", first)
    assert weft.load(tmp_path / "alone", second) == {}
    with pytest.raises(weft.WeftError, match="no optimizer was saved"):
        weft.load(tmp_path / "alone", second, mine)


def test_the_folder_gives_weights(tmp_path: Path) -> None:
    run = Run("tp=2")
    run.train(range(1))
    run.save(tmp_path / "run")
    (step,) = (tmp_path / "run").glob("step-*")
    for folder in (tmp_path / "run", step):
        parallel: Any = weft.parallelize(net(seed=9), batch(0), "dp=2", emulate=True, cache=None, weights=folder)
        torch.testing.assert_close(parallel.full_state_dict(), run.parallel.full_state_dict(), rtol=0, atol=0)


@pytest.fixture(scope="module")
def run() -> Run:
    return Run("dp=2")


def test_what_is_no_such_folder_is_told(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "run")
    kept = run.parallel.full_state_dict()
    (folder,) = (tmp_path / "run").glob("step-*")

    def refused(match: str, where: Path = tmp_path / "run", one: Run = run) -> None:
        with pytest.raises(weft.WeftError, match=match):
            weft.load(where, one.parallel, one.optimizer)

    refused("no saved run", tmp_path / "nowhere")
    refused(r"up.weight has shape \[12, 8\], the model's has \[20, 8\]", one=Run("dp=1", net(width=20)))
    with pytest.raises(weft.WeftError, match="the state of AdamW was saved, and SGD"):
        weft.load(tmp_path / "run", run.parallel, torch.optim.SGD(run.parallel.parameters(), lr=0.1))
    with pytest.raises(weft.WeftError, match="is no plain value"):
        weft.save(tmp_path / "run", run.parallel, rng=torch.zeros(3))
    with pytest.raises(weft.WeftError, match="not what parallelize"):
        weft.save(tmp_path / "run", net())
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    refused("cut short|model.safetensors")
    save_file({**load_file_of(whole, tmp_path), "other": torch.zeros(1)}, folder / "model.safetensors")
    refused("the model has no other")
    (folder / "model.safetensors").write_bytes(whole)
    text = (folder / "training.json").read_text()
    (folder / "training.json").write_text(text[: len(text) // 2])
    refused("cut short")
    # the ranks go on, with what they had
    torch.testing.assert_close(run.parallel.full_state_dict(), kept)


def load_file_of(content: bytes, folder: Path) -> dict[str, Tensor]:
    (folder / "copy.safetensors").write_bytes(content)
    return load_file(folder / "copy.safetensors")


def test_a_write_that_fails_leaves_the_old_state(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(tmp_path / "run")
    before = json.loads((tmp_path / "run" / "latest.json").read_text())

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(weft.WeftError, match="No space left"):
        run.save(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "latest.json").read_text()) == before
    run.load(tmp_path / "run")


def test_every_rank_with_an_optimizer_of_its_own(through: dict[str, Tensor], tmp_path: Path) -> None:
    """As processes have it; a fault of one rank is an error on all."""

    def begin(module: Any) -> None:
        module.seed = 7
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 0.02 * 0.8**step
            module.train_step(batch(step), optimizer)
        weft.save(tmp_path / "run", module, optimizer)

    def go_on(module: Any) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
        mine = tmp_path / ("run" if module.program.transport.rank else "nowhere")
        with pytest.raises(weft.WeftError, match="no saved run"):
            weft.load(mine, module, optimizer)
        weft.load(tmp_path / "run", module, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.02 * 0.8**2
        for step in range(3, 5):
            optimizer.param_groups[0]["lr"] = 0.02 * 0.8**step
            module.train_step(batch(step), optimizer)
        state: dict[str, Tensor] = module.full_state_dict()
        return state

    on_ranks(net(), batch(0), "dp=2,zero=3", begin)
    for state in on_ranks(net(seed=4), batch(0), "tp=2", go_on):
        assert set(state) == set(through)
        torch.testing.assert_close({name: state[name] for name in through}, through, rtol=1e-9, atol=1e-10)

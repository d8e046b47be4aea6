"""Losses that are never finite end with an error in at most 64 steps, whatever the loss scale does on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.cli import main
from weft.errors import RunError

STEPS = 64


class Net(nn.Module):
    """Its loss is what `outcome` makes of it; what comes back is finite, whatever the loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, outcome: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).float().square().mean() + outcome.float().mean()


def batch(outcome: float) -> tuple[Tensor, Tensor]:
    return torch.ones(4, 6), torch.full((4,), outcome)


def parallel(plan: str) -> Any:
    torch.manual_seed(0)
    return weft.parallelize(Net(), batch(0.0), plan, emulate=True, cache=None, precision="fp16")


SCALERS: dict[str, dict[str, float]] = {
    "halved": {},
    "small": {"init_scale": 2.0**-100},
    "lowered fast": {"backoff_factor": 1e-3},
    "subnormal": {"init_scale": 1e-40},
    "zero": {"init_scale": 0.0},
}


def by_hand(module: Any, optimizer: Any, scaler: Any, outcome: float) -> None:
    optimizer.zero_grad()
    scaler.scale(module(*batch(outcome))).backward()
    scaler.step(optimizer)
    scaler.update()


def in_one_call(module: Any, optimizer: Any, scaler: Any, outcome: float) -> None:
    module.train_step(batch(outcome), optimizer, scaler=scaler)


@pytest.mark.parametrize("settings", SCALERS)
@pytest.mark.parametrize(
    ("plan", "step", "outcome"),
    [
        ("dp=2,zero=2", by_hand, float("nan")),
        ("dp=2,zero=2", in_one_call, float("inf")),
        pytest.param("pp=2,microbatches=2", in_one_call, float("nan"), marks=pytest.mark.full),
    ],
)
def test_a_loss_that_is_never_finite(plan: str, step: Any, outcome: float, settings: str) -> None:
    module = parallel(plan)
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=1e-3), weft.GradScaler("cpu", **SCALERS[settings])
    with pytest.raises(RunError, match=r"not finite in 64 steps|cannot be scaled back") as raised:
        for _ in range(STEPS):
            step(module, optimizer, scaler, outcome)
    assert "bfloat16" in raised.value.remedy and "test_loss_scale.py:" in raised.value.place


class Overflowing(Net):
    """Gradients that are never finite."""

    def forward(self, x: Tensor, outcome: Tensor) -> Tensor:
        return self.down(self.up(x)).float().square().mean() * outcome.float().mean()


@pytest.mark.parametrize("settings", SCALERS)
@pytest.mark.parametrize("step", [by_hand, in_one_call])
def test_gradients_that_are_never_finite(settings: str, step: Any) -> None:
    module = weft.parallelize(Overflowing(), batch(1.0), "tp=2", emulate=True, cache=None, precision="fp16")
    before = module.state_dict()
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=1e-3), weft.GradScaler("cpu", **SCALERS[settings])
    with pytest.raises(RunError, match=r"not finite in 64 steps|cannot be scaled back"):
        for _ in range(STEPS):
            step(module, optimizer, scaler, float("inf"))
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_one_good_step_begins_anew() -> None:
    module = parallel("dp=2")
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=1e-3), weft.GradScaler("cpu")
    for number in range(2 * STEPS):
        by_hand(module, optimizer, scaler, 0.0 if number % STEPS == STEPS - 1 else float("nan"))


FILE = """
import torch
from torch import nn


class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x).float().square().mean() + float("nan")


def model():
    return Net(6, 4)


def example():
    return torch.ones(4, 6)


def data():
    while True:
        yield torch.ones(4, 6)
"""


def test_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.py"
    path.write_text(FILE)
    options = ["--plan", "dp=1", "--precision", "fp16", "--steps", str(STEPS + 1), "--cache", str(tmp_path / "cache")]
    assert main(["train", str(path), *options]) == 2
    told = capsys.readouterr().err
    assert "the loss is nan in step 0" in told and "  try: " in told, told

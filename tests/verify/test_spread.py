"""Optimizers that look at whole matrices: equal to one device where each parameter lies whole on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import PlanError
from weft.verify import verify

FILE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.down(nn.functional.gelu(self.up(self.norm(x)))), y)


def model():
    torch.manual_seed(0)
    return Net()


def example():
    return torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1)).unbind()


def optimizer(parameters):
"""
ADAFACTOR = "    return torch.optim.Adafactor(parameters, lr=0.02)"
MUON = """
    matrices = [one for one in parameters if one.ndim == 2]
    others = [one for one in parameters if one.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2)]
"""


def write(folder: Path, optimizer: str) -> Path:
    path = folder / "net.py"
    path.write_text(FILE + optimizer)
    return path


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    [
        (ADAFACTOR, "dp=2,tp=2,spread"),
        (ADAFACTOR, "dp=2,zero=3,spread"),
        (ADAFACTOR, "pp=2,tp=2,stages=down,spread"),
        (MUON, "dp=2"),
        (MUON, "dp=4,spread"),
        (MUON, "dp=2,zero=2,spread=matrices"),
        (MUON, "pp=2,stages=down,spread"),
    ],
)
def test_equal(tmp_path: Path, optimizer: str, plan: str) -> None:
    result = verify(write(tmp_path, optimizer), plan=plan)
    assert result.equal, result.differences


@pytest.mark.parametrize("plan", ["pp=2,dp=2,zero=2,stages=down,spread=matrices", "pp=2,dp=2,stages=down,spread"])
def test_a_weight_of_two_stages(tmp_path: Path, plan: str) -> None:
    """Each of them has it whole on one of its devices; the others hold nothing of it."""
    path = write(tmp_path, MUON)
    text = path.read_text().replace("self.down(nn", "nn.functional.linear(self.down(nn")
    path.write_text(text.replace("(self.norm(x)))), y)", "(self.norm(x)))), self.up.weight)[..., :6], y)"))
    assert "self.up.weight)[" in path.read_text()
    result = verify(path, plan=plan)
    assert result.equal, result.differences


def test_the_way_out_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"Adafactor mixes the elements.*\n(.|\n)*spread"):
        verify(write(tmp_path, ADAFACTOR), plan="tp=2")
    # vectors are AdamW's
    with pytest.raises(PlanError, match=r"stores up.weight in parts"):
        verify(write(tmp_path, MUON), plan="tp=2")

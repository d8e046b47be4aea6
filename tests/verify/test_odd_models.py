"""Models in which precision, randomness or state could part the two sides: all equal, in float32 and bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from weft.cli import main


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.2)
        self.norm, self.frozen = nn.BatchNorm1d(8), nn.Parameter(torch.ones(8), requires_grad=False)
        self.only_without_grad, self.unused = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(3))


class Autocast(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.drop(F.relu(self.a(x)))
        return self.b(y.float().to(x.dtype)).square().mean()


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda z: self.drop(F.gelu(self.a(z))), x + self.b.bias, use_reentrant=False)
        return self.drop(self.b(y)).square().mean()


class Limits(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        return (y / (y.abs().amax(-1, keepdim=True) + torch.finfo(y.dtype).eps)).square().mean()


class Statistics(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.norm(self.a(x)))).square().mean()


class WithoutGrad(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.a.weight.mean() + self.only_without_grad.sum()
        return (self.b(self.a(x)) * scale * self.frozen).square().mean()


class Literals(Net):
    def forward(self, x: Tensor) -> Tensor:
        made = torch.tensor(0.1) + torch.full((8,), 0.3) + torch.arange(8) / 7 + torch.linspace(0, 1, 8)
        return (self.b(self.a(x)) * made).float().square().mean()


class Noise(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.a(x + 0.1 * torch.randn_like(x))) * torch.rand(8)).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Autocast, Checkpointed, Limits, Statistics, WithoutGrad, Literals, Noise])
def test_equal(kind: type[Net], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, batch = kind().to(dtype), (torch.randn(6, 8, dtype=dtype),)
    result = weft.verify(model, batch, plan="dp=2", seed=5)
    assert result.equal, str(result)


def test_the_optimizer_of_the_model_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        return self.a(x).square().mean()\n"
        "def model(): return Net()\n"
        "def example(): return torch.ones(4, 4)\n"
        "def optimizer(parameters):\n"
        "    assert len(list(parameters)) == 2\n"
        "    return torch.optim.SGD(parameters, lr=float('inf'))\n"
    )
    # An infinite rate makes both sides useless after one step: it must be noticed, not called equal.
    assert main(["verify", str(path), "--plan", "dp=2"]) == 2


def test_a_forward_that_raises_shows_its_own_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).reshape(77).mean()\n"
        "def model(): return Net(4, 4)\n"
        "def example(): return torch.ones(4, 4)\n"
    )
    assert main(["verify", str(path), "--plan", "dp=2"]) == 2
    err = capsys.readouterr().err
    assert "net.py:5" in err and "Traceback" not in err

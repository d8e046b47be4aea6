"""The user's optimizer: what it must be, and that one which mixes elements is refused where it would go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weft
from weft.compile.optimizer import needs_closure
from weft.errors import ModelFileError, PlanError
from weft.runtime.checks.elementwise import mixing

MODEL = """
import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


def model():
    torch.manual_seed(0)
    return Net()


def example():
    return (torch.randn(4, 6),)


def optimizer(parameters):
    return {made}
"""


@pytest.fixture
def net(tmp_path: Path):
    def write(made: str, old: str = "", new: str = "") -> Path:
        path = tmp_path / "net.py"
        path.write_text(MODEL.format(made=made).replace(old, new) if old else MODEL.format(made=made))
        return path

    return write


@pytest.mark.parametrize(
    ("made", "says", "place"),
    [
        ("3", "optimizer() returned a int, not a torch.optim.Optimizer", "net.py"),
        ("None", "optimizer() returned None", "net.py"),
        ("torch.optim.SGD", "optimizer() returned a type", "net.py"),
        ("torch.optim.SGD(parameters, lr=-1)", "Invalid learning rate: -1", "net.py:27"),
        ("torch.optim.SGD(parameters.parameters())", "no attribute 'parameters'", "net.py:27"),
        ("torch.optim.LBFGS(parameters)", "LBFGS needs a closure", "net.py"),
        ("torch.optim.SparseAdam(parameters)", "the optimizer's step() raised RuntimeError", "net.py"),
        ("sys.exit(7)", "optimizer() called sys.exit(7)", "net.py:27"),
    ],
)
def test_what_is_no_optimizer_is_the_users_to_know(net, made: str, says: str, place: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        weft.verify(net(made), plan="dp=2")
    assert says in caught.value.message and place in caught.value.place and caught.value.remedy


def test_sparse_gradients_are_refused_with_the_line(net) -> None:
    path = net("torch.optim.SGD(parameters, lr=0.1)", "nn.Linear(6, 8, bias=False)", "nn.Embedding(9, 8, sparse=True)")
    path.write_text(path.read_text().replace("torch.randn(4, 6)", "torch.arange(4)"))
    with pytest.raises(ModelFileError, match="sparse gradient") as caught:
        weft.verify(path, plan="dp=2")
    assert "net.py:14" in caught.value.place


@pytest.mark.parametrize(
    ("made", "mixes"),
    [
        (torch.optim.AdamW, False),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), False),
        (torch.optim.RMSprop, False),
        (torch.optim.Adafactor, True),
        (torch.optim.Muon, True),
        (lambda p: torch.optim.SGD([p[3]], lr=0.1), False),
    ],
    ids=["AdamW", "SGD", "RMSprop", "Adafactor", "Muon", "cannot be probed"],
)
def test_mixing_is_found_by_trying(made, mixes: bool) -> None:
    assert bool(mixing(made, {2}).elements) is mixes


def test_a_norm_over_all_gradients_mixes_them() -> None:
    class Clipped(torch.optim.SGD):
        def step(self, closure=None):
            torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
            return super().step(closure)

    assert mixing(lambda parameters: Clipped(parameters, lr=0.1), {2}).elements
    assert not needs_closure(Clipped([torch.zeros(1)], lr=0.1)) and needs_closure(torch.optim.LBFGS([torch.zeros(1)]))


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_an_optimizer_that_mixes_is_refused_on_parts_alone(net, name: str) -> None:
    path = net(f"torch.optim.{name}(parameters)")
    assert weft.verify(path, plan="dp=2").equal
    with pytest.raises(PlanError) as caught:
        weft.verify(path, plan="tp=2")
    assert name in caught.value.message and "up.weight" in caught.value.message and "dp" in caught.value.remedy


def test_sys_exit_in_a_model_file_does_not_leave(net) -> None:
    for old, place in (
        ("import sys\n", ":2"),
        ("    torch.manual_seed(0)\n", ":18"),
        ("        return self.down", ":14"),
    ):
        indent = old[: len(old) - len(old.lstrip())]
        new = f"{indent}import sys; sys.exit(7)\n" + ("" if old.endswith("\n") else old)
        with pytest.raises(ModelFileError, match=r"called sys.exit\(7\)") as caught:
            weft.verify(net("torch.optim.SGD(parameters)", old, new), plan="dp=2")
        assert f"net.py{place}" in caught.value.place

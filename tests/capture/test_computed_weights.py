"""Weights that hooks of torch compute before each forward: `torch.nn.utils.weight_norm`, `spectral_norm`, `prune`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm, weight_norm

import weft
from weft.capture import capture
from weft.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore")
HOOKS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}
X = torch.randn(4, 6)


class Hooked(nn.Module):
    def __init__(self, hook: str, reads: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.reads = HOOKS[hook](nn.Linear(6, 8)), nn.Linear(8, 6), reads

    def forward(self, x: Tensor) -> Tensor:
        before = self.a.weight.sum() if self.reads else 0
        return (self.b(self.a(x).tanh()) + self.a.weight.mean() + before).pow(2).mean()


@pytest.mark.parametrize("hook", HOOKS)
def test_same_numbers(hook: str) -> None:
    model = Hooked(hook)
    kept = model.a.weight
    for plan in ("dp=2", "tp=2"):
        assert weft.verify(model, X, plan=plan)
    assert model.a.weight is kept


@pytest.mark.parametrize("hook", HOOKS)
def test_trains_as_eager_does(hook: str) -> None:
    torch.manual_seed(0)
    eager = Hooked(hook).double()
    torch.manual_seed(0)
    parallel = weft.parallelize(Hooked(hook).double(), X.double(), plan="dp=2", emulate=True)
    losses = []
    for model in (eager, parallel):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for mode in (True, True, False, True):
            model.train(mode)
            loss = model(X.double())
            losses[-1].append(loss.item())
            if mode:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-12, atol=1e-12)


def test_what_the_last_forward_left_is_not_read() -> None:
    with pytest.raises(CaptureError, match="weight"):
        capture(Hooked("weight_norm", reads=True), X)

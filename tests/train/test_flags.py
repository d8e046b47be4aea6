"""Arguments that are no tensors: another flag or word has a program of its own, a number that changes is a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.train.ranks import on_ranks
from weft.errors import RunError

X = torch.randn(4, 8, dtype=torch.float64)


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 8)
        self.double()

    def forward(self, x: Tensor, scale: float | Tensor = 1.0, *, square: bool = True, kind: str = "relu") -> Tensor:
        y = self.b(getattr(torch, kind)(self.a(x))) * scale
        return (y.square() if square else y.abs()).mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3"])
def test_another_flag_or_word(plan: str) -> None:
    torch.manual_seed(0)
    eager = Switched()
    torch.manual_seed(0)
    parallel = weft.parallelize(Switched(), {"x": X, "square": True, "kind": "relu"}, plan, emulate=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, parallel)]
    for square, kind in ((True, "relu"), (False, "relu"), (False, "tanh"), (True, "relu"), (False, "relu")):
        batch = {"x": X, "square": square, "kind": kind}
        losses = []
        for model, optimizer in zip((eager, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(model(**batch))
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
    loss = parallel.train_step({"x": X, "square": False, "kind": "relu"}, optimizers[1])
    torch.testing.assert_close(loss, eager(X, square=False).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_steps_with_another_flag_or_word(plan: str) -> None:
    """As a call does: the step of another flag is that of another program."""

    torch.manual_seed(0)
    model = Switched()

    def steps(module: Any) -> list[float]:
        optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
        for square, kind in ((True, "relu"), (False, "relu"), (False, "tanh"), (True, "relu"), (False, "tanh")):
            batch = {"x": X, "square": square, "kind": kind}
            if module is model:
                optimizer.zero_grad()
                losses.append(module(**batch))
                losses[-1].backward()
                optimizer.step()
            elif len(losses) == 2:
                optimizer.zero_grad()
                losses.append(module.forward_backward(batch))
                optimizer.step()
            else:
                losses.append(module.train_step(batch, optimizer))
        return [loss.item() for loss in losses]

    example = {"x": X, "square": True, "kind": "relu"}
    found = on_ranks(model, example, plan, steps)
    wanted = steps(model)
    for losses in found:
        torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)


def test_a_number_that_changes_is_a_tensor() -> None:
    parallel = weft.parallelize(Switched(), (X, 1.0), "dp=2", emulate=True)
    with pytest.raises(
        RunError, match=r"argument 1 .* is 2.0, in the example it is 1.0.*torch.tensor\(2.0\)"
    ) as caught:
        parallel(X, 2.0)
    assert "test_flags.py" in caught.value.place
    torch.manual_seed(0)
    eager = Switched()
    torch.manual_seed(0)
    parallel = weft.parallelize(Switched(), (X, torch.tensor(1.0)), "dp=2", emulate=True)
    for value in (1.0, 2.0, 0.5):
        torch.testing.assert_close(parallel(X, torch.tensor(value)), eager(X, value), rtol=1e-12, atol=1e-12)

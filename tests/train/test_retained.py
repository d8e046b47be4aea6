"""A second backward through one forward (`retain_graph=True`): gradients add up as in eager. Outputs that retain their
gradient have eager's, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.train.ranks import on_ranks
from weft.errors import RunError


class Net(nn.Module):
    """Tied weights, layers, a cross entropy whose scores nobody else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


PLANS = ["dp=1", "dp=2", "tp=2", "dp=2,zero=3", "dp=2,zero=2", "tp=2,recompute=blocks.*", "dp=2,coshard=2"]


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_add_up(plan: str) -> None:
    eager, tokens = net(), torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(1))
    parallel: Any = weft.parallelize(net(), (tokens,), plan, emulate=True, cache=None)
    for one in (eager, parallel):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        loss = one(tokens)
        loss.backward(retain_graph=True)
        (2 * loss).backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        # and the next step is as if nothing had been
        optimizer.zero_grad()
        one(tokens).backward()
        optimizer.step()
    torch.testing.assert_close(parallel.state_dict(), eager.state_dict(), rtol=1e-11, atol=1e-12)
    loss = parallel(tokens)
    loss.backward()
    with pytest.raises(RunError, match="retain_graph=True"):
        loss.backward()


def test_gradients_of_inputs_and_outputs() -> None:
    """A part between trained parts, whose outputs are differentiated one after the other."""

    class Two(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(x)
            return y.relu(), y.tanh()

    torch.manual_seed(0)
    part, x = Two(6, 5).double(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    parallel: Any = weft.parallelize(part, (x,), "tp=2", emulate=True, cache=None)
    found = []
    for one in (part, parallel):
        x.grad = None
        first, second = one(x)
        first.sum().backward(retain_graph=True)
        second.square().sum().backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        assert x.grad is not None
        found.append((x.grad, dict(one.state_dict())))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


class Classifier(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3", "dp=2,spread"])
def test_outputs_that_retain_their_gradient(plan: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(4, (6,))
    eager = Classifier(4, 4).double()

    def body(parallel: Any) -> None:
        for make in (lambda out: out["loss"], lambda out: out["loss"] + out["logits"].sum()):
            out = parallel(*batch)
            out["logits"].retain_grad()
            with pytest.raises(RunError, match=r"retain_grad\(\) was called on an output"):
                make(out).backward()
            out = parallel(*batch)
            hook = out["logits"].register_hook(lambda gradient: gradient.clamp(-1, 1))
            with pytest.raises(RunError, match=r"register_hook\(\) was called on an output"):
                make(out).backward()
            hook.remove()
        for _ in range(2):
            found = []
            for module in (eager, parallel):
                out = module(*batch)
                out["logits"].retain_grad()
                out["logits"].square().sum().backward()
                found.append(out["logits"].grad)
            torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)
        out = parallel(*batch)
        out["loss"].retain_grad()
        out["loss"].backward()
        assert out["loss"].grad == 1
        out, seen = parallel(*batch), []
        out["loss"].register_hook(lambda gradient: seen.append(gradient.item()))
        out["loss"].backward()
        assert seen == [1]

    body(weft.parallelize(eager, batch, plan, emulate=True, cache=None))
    on_ranks(eager, batch, plan, body, outputs="all")

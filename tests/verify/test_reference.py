"""The reference run against training by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from weft.compile.model_file import Subject
from weft.errors import ModelFileError, RunError
from weft.verify.batches import batches_of
from weft.verify.reference import direct_checkpoints, float_dtype, run_reference, widen_module


class Net(nn.Module):
    """Tied weights, a frozen parameter, an unused one, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return (self.second(torch.tanh(self.first(x))) * self.frozen).float().square().mean()


def net() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(3, 4)


def test_steps_by_hand() -> None:
    model, x = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = run_reference(Subject(model, (x,)), seed=0, wide=True)

    w, b = before["first.weight"].double().requires_grad_(), before["first.bias"].double().requires_grad_()
    update = torch.optim.AdamW([w, b], lr=1e-3)
    for step, (batch,) in enumerate(batches_of((x,), other=True)):
        update.zero_grad()
        loss = F.linear(torch.tanh(F.linear(batch.double(), w, b)), w).square().mean()
        loss.backward()
        assert found.losses[step].item() == pytest.approx(loss.item(), rel=1e-14)
        assert set(found.gradients[step]) == {"first.weight", "first.bias"}
        assert w.grad is not None
        torch.testing.assert_close(found.gradients[step]["first.weight"], w.grad, rtol=1e-13, atol=1e-15)
        update.step()
    torch.testing.assert_close(found.weights["first.weight"], w.detach(), rtol=1e-13, atol=0)
    assert found.weights["unused"].tolist() == [1.0, 1.0] and found.weights["seen"].item() == 3

    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == before[name].dtype for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_own_precision() -> None:
    model, x = net()
    found = run_reference(Subject(model, (x,)), seed=0, wide=False)
    assert found.losses[0].dtype == torch.float32
    wide = run_reference(Subject(model, (x,)), seed=0, wide=True)
    assert 0 < abs(found.losses[0].item() - wide.losses[0].item()) < 1e-6


class Dropped(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(self.layer(x)), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.layer.bias
        y = self.body(y) if self.how == "plain" else checkpoint(self.body, y, use_reentrant=self.how == "reentrant")
        return F.dropout(y, 0.5).square().mean()


def test_dropout_is_drawn_once_with_or_without_checkpoint() -> None:
    samples = []
    for how in ("plain", "reentrant", "free"):
        torch.manual_seed(0)
        subject = Subject(Dropped(how), (torch.ones(4, 8),))
        state = torch.get_rng_state()
        samples.append(run_reference(subject, seed=3, wide=True))
        assert torch.equal(state, torch.get_rng_state()), "the global generator was touched"
    plain, *others = samples
    for other in others:
        assert torch.equal(plain.losses[1], other.losses[1])
        assert torch.equal(plain.gradients[1]["layer.weight"], other.gradients[1]["layer.weight"])
    elsewhere = run_reference(subject, seed=4, wide=True)
    assert not torch.equal(plain.losses[0], elsewhere.losses[0])
    assert not torch.equal(plain.losses[0], plain.losses[1])


def test_a_reentrant_checkpoint_without_a_graded_input_gives_no_gradient() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with direct_checkpoints():
        assert not checkpoint(layer, x, use_reentrant=True).requires_grad
        assert checkpoint(layer, x, use_reentrant=False).requires_grad
        assert checkpoint(layer, x.requires_grad_(), use_reentrant=True).requires_grad


def test_widening_keeps_ties() -> None:
    model, _ = net()
    shared = torch.ones(3)
    model.first.register_buffer("table", shared)
    model.second.register_buffer("table", shared)
    widen_module(model)
    assert model.first.weight is model.second.weight and model.first.weight.dtype == torch.float64
    assert model.first.table is model.second.table and model.first.table.dtype == torch.float64
    assert model.seen.dtype == torch.int64


def test_float_dtype_is_that_of_most_weights() -> None:
    assert float_dtype(nn.Sequential(nn.Linear(9, 9).bfloat16(), nn.LayerNorm(9))) == torch.bfloat16


def test_the_limits_of_the_models_own_dtype() -> None:
    class Limits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.w * torch.finfo(x.dtype).eps).sum()

    found = run_reference(Subject(Limits(), torch.ones(1)), seed=0, wide=True)
    assert found.losses[0].item() == torch.finfo(torch.float32).eps


def test_a_loss_that_is_not_finite_is_refused() -> None:
    model, x = net()
    with pytest.raises(RunError, match="loss is nan in step 1"):
        run_reference(Subject(model, (x * math.nan,)), seed=0, wide=True)


def test_no_loss_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"of shape \[3, 4\]"):
        run_reference(Subject(nn.Linear(4, 4), (torch.ones(3, 4),)), seed=0, wide=True)


def test_a_module_that_holds_a_graph_is_refused() -> None:
    model, x = net()
    model.cache = model.first.weight * 2  # type: ignore[assignment]
    with pytest.raises(ModelFileError, match="cache"):
        run_reference(Subject(model, (x,)), seed=0, wide=True)

"""parallelize(): the same numbers as eager training, in the emulator and on processes, and the calls of a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.train.eager import STEPS, adamw, check_same, gpt, mlp, train_eager
from weft.errors import PlanError, RunError


def train(parallel: nn.Module, batch: Any) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = adamw(parallel)
    losses = [parallel.train_step(batch, optimizer).item() for _ in range(STEPS)]
    return losses, parallel.state_dict()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,tp=2"])
def test_a_gpt_with_tied_weights_and_dropout_trains_as_on_one_device(plan: str) -> None:
    module, batch = gpt()
    check_same(train(weft.parallelize(module, batch, plan, emulate=True), batch), train_eager(module, batch))


def test_keyword_batches_and_a_plain_backward() -> None:
    module, batch = mlp()
    parallel = weft.parallelize(module, batch, "dp=2", emulate=True)
    optimizer = adamw(parallel)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = parallel(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    check_same((losses, parallel.state_dict()), train_eager(module, batch))


def test_gradients_accumulate_and_scale() -> None:
    module, batch = mlp()
    module.drop.p = 0.0
    parallel = weft.parallelize(module, batch, "dp=2", emulate=True)
    for factor in (1.0, 2.0):
        (parallel(**batch) * factor).backward()
    module(**batch).backward()
    for name, parameter in parallel.ranks[1].named_parameters():
        wanted = module.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, 3 * wanted, rtol=1e-12, atol=1e-13)


def test_each_rank_has_the_original_names_and_its_parts() -> None:
    module, batch = gpt()
    parallel = weft.parallelize(module, batch, "tp=2", emulate=True)
    rank = parallel.ranks[0]
    assert [name for name, _ in rank.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert list(rank.state_dict()) == list(module.state_dict())
    assert rank.get_parameter("lm_head.weight") is rank.get_parameter("transformer.wte.weight")
    assert any(p.shape != module.get_parameter(name).shape for name, p in rank.named_parameters())
    assert (rank.replica, rank.num_replicas) == (0, 1)


def test_a_state_dict_goes_there_and_back() -> None:
    module, batch = gpt()
    parallel = weft.parallelize(module, batch, "tp=2", emulate=True)
    other, _ = gpt(dropout=0.0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    parallel.load_state_dict(other.state_dict())
    for name, tensor in parallel.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_frozen_parameters_stay() -> None:
    module, batch = gpt()
    for parameter in module.transformer.h.parameters():
        parameter.requires_grad_(False)
    parallel = weft.parallelize(module, batch, "tp=2", emulate=True)
    found = train(parallel, batch)
    check_same(found, train_eager(module, batch))
    frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
    assert frozen and all(torch.equal(found[1][name], module.state_dict()[name]) for name in frozen)
    assert all(p.grad is None for n, p in parallel.ranks[0].named_parameters() if n in frozen)


def test_a_function_that_makes_the_model_is_replayed_under_the_seed() -> None:
    made = []

    def make() -> nn.Module:
        made.append(nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), Mean()))
        return made[-1]

    batch = torch.randn(4, 6, dtype=torch.float64)
    before = torch.random.get_rng_state()
    parallel = weft.parallelize(make, batch, "dp=2", emulate=True, seed=7)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(7)
    wanted = make().state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in parallel.state_dict().items())


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_other_batches_are_refused() -> None:
    module, batch = mlp()
    parallel = weft.parallelize(module, batch, "dp=2", emulate=True)
    with pytest.raises(RunError, match=r"x of the batch is \[4, 6\]"):
        parallel(x=batch["x"][:4], y=batch["y"][:4])
    with pytest.raises(RunError):
        # the ranks have ended: the module says so again and does not hang
        parallel(**batch)


def test_alone_or_with_too_few() -> None:
    module, batch = mlp()
    with pytest.raises(RunError, match="needs 2 processes"):
        weft.parallelize(module, batch, "dp=2")
    with pytest.raises(PlanError):
        weft.parallelize(module, batch, "dp=2", devices=1, emulate=True)
    parallel = weft.parallelize(module, batch, "dp=1")
    check_same(train(parallel, batch), train_eager(module, batch))

"""A layer that is frozen in a forward gets nothing from it, whatever it is when backward comes, as in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.train.ranks import on_ranks
from tests.train.test_unused_outputs import EveryRank
from weft.errors import WeftError
from weft.runtime.links.transport import put_shard


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.b = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, deep: bool) -> Tensor:
        x = torch.tanh(self.a(x))
        return self.b(torch.tanh(self.c(x)) if deep else x).square().mean()


def layers() -> Layers:
    torch.manual_seed(0)
    return Layers().double()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


PLANS = ["dp=1", "dp=2", "tp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,spread", "tp=2,spread"]
RECOMPUTED = ["dp=1,recompute=full", "dp=2,recompute=full", "dp=2,zero=3,recompute=full"]


def frozen_forward(module: Any, step: int) -> Tensor:
    for layer in (module.a, module.b):
        layer.requires_grad_(False)
    loss: Tensor = module(batch(step), True)
    for layer in (module.a, module.b):
        layer.requires_grad_(True)
    return loss


def alone(module: Any, step: int) -> None:
    frozen_forward(module, step).backward()


def first(module: Any, step: int) -> None:
    (frozen_forward(module, step) + module(batch(step + 10), True)).backward()


def second(module: Any, step: int) -> None:
    (module(batch(step + 10), True) + frozen_forward(module, step)).backward()


def crossed(module: Any, step: int) -> None:
    loss = module(batch(step + 10), True)
    frozen_forward(module, step)
    loss.backward()


@pytest.mark.parametrize("run", [alone, first, second, crossed])
@pytest.mark.parametrize("plan", PLANS)
def test_weights_after_some_steps(plan: str, run: Any) -> None:
    """Momentum and weight decay move what has a gradient of zeros, and leave what has none."""
    compare(plan, run)


@pytest.mark.parametrize("plan", RECOMPUTED)
def test_what_is_recomputed(plan: str) -> None:
    compare(plan, alone)


@pytest.mark.parametrize("run", [first, second])
def test_recomputed_as_in_the_last_forward_only(run: Any) -> None:
    with pytest.raises(WeftError, match="was frozen in one forward and not in another"):
        compare("dp=2,recompute=full", run)


@pytest.mark.parametrize("run", [alone, first, second, crossed])
def test_masters(run: Any) -> None:
    """The weights that a program computes with are other tensors than those that are frozen."""
    eager = layers()
    parallel = weft.parallelize(copy.deepcopy(eager), (batch(), True), "dp=2", emulate=True, precision="bf16")
    run(eager, 0)
    run(EveryRank(parallel), 0)
    for (name, one), other in zip(eager.named_parameters(), parallel.ranks[0].parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert torch.nn.functional.cosine_similarity(one.grad.flatten(), other.grad.flatten(), 0) > 0.99, name


def compare(plan: str, run: Any) -> None:
    eager = layers()
    parallel = weft.parallelize(copy.deepcopy(eager), (batch(), True), plan, emulate=True, cache=None)
    for module, frozen in ((eager, eager), (parallel, EveryRank(parallel))):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
        for step in range(3):
            optimizer.zero_grad()
            run(frozen, step)
            optimizer.step()
    torch.testing.assert_close(parallel.state_dict(), eager.state_dict(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("plan", PLANS)
def test_which_gradients_there_are(plan: str) -> None:
    """On every rank, also of what other ranks store, and of what the program of the call does not use."""

    def found(module: Any) -> list[list[str]]:
        told = []
        for run in (alone, lambda module, step: module(batch(step), False).backward()):
            module.zero_grad()
            run(module, 0)
            told.append([name for name, one in module.named_parameters() if one.grad is None])
        return told

    wanted = found(layers())
    assert wanted == [["a.weight", "a.bias", "b.weight", "b.bias"], ["c.weight", "c.bias"]]
    for told in on_ranks(layers(), (batch(), True), plan, found):
        assert told == wanted


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_set_to_zero_by_hand(plan: str) -> None:
    """As torch's optimizers once did it: `detach_()` is not for views."""

    def steps(module: Any) -> None:
        for step in range(2):
            module(batch(step), True).backward()
            for one in module.parameters():
                one.grad.detach_()
                one.grad.zero_()
                assert not one.grad.as_subclass(Tensor).count_nonzero()

    on_ranks(layers(), (batch(), True), plan, steps)


def test_a_shard_of_one_row_lies_in_its_place() -> None:
    """The strides of a dim of one element are any: to copy it onto itself is refused by torch."""
    full = torch.arange(8.0).view(1, 8)
    put_shard(full, ((((0, 1),), ((0, 4),))), full.flatten()[:4].view(1, 4))
    assert full.tolist() == [list(range(8))]

"""Every rank lists every parameter of the original, under its name and in its place: empty where it holds nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.pools import Pools
from tests.train import listed
from tests.train.listed import Net, batch, net
from tests.train.ranks import on_ranks
from weft.compile.model_file import Subject
from weft.compile.programs import Programs
from weft.errors import RunError
from weft.runtime.checks.shard_tensor import ShardParameter

PLANS = ["dp=2,spread", "pp=2,microbatches=2,stages=head", "dp=2,zero=3", "tp=2"]
CLOSE: Any = {"rtol": 1e-9, "atol": 1e-12}


@pytest.mark.parametrize("plan", PLANS)
def test_a_loop_of_one_device_is_right_on_processes(plan: str, pools: Pools) -> None:
    model = net()
    programs = Programs(lambda module: Subject(model, batch()), plan, None, cache=None, outputs="loss")
    weights, means, norms, grads = listed.trained_eagerly()
    names = [name for name, _ in model.named_parameters()]
    sizes = dict.fromkeys(names, 0)
    for kinds, kept, mean, its_norms, full, gradients, saved in pools(2).run(
        listed.trains, (dict(programs.training(model)), model)
    ):
        assert list(kinds) == names and saved == names
        for name, one in model.named_parameters():
            trained, dims, numel = kinds[name]
            assert trained == one.requires_grad and dims == max(one.dim(), not numel)
            sizes[name] += numel
        for found, expected in ((kept, weights), (mean, means), (full, weights), (gradients, grads)):
            torch.testing.assert_close(dict(found), dict(expected), **CLOSE)
        torch.testing.assert_close(its_norms, norms, **CLOSE)
    assert all(sizes[name] >= one.numel() for name, one in model.named_parameters())


@pytest.mark.parametrize("plan", PLANS[:2])
def test_what_is_not_there_is_a_shard_of_nothing(plan: str) -> None:
    def body(module: Any) -> list[str]:
        empty = [name for name, one in module.named_parameters() if not one.numel()]
        for name in empty:
            one = module.get_parameter(name)
            assert type(one) is ShardParameter and one.dtype == torch.float64
            assert module.stored[name][0] == () and one.shape[1:] == net().get_parameter(name).shape[1:]
            with pytest.raises(RunError, match=f"{name}(.|\n)*full_tensor"):
                one.detach().norm()
        module.requires_grad_(False)
        module.head.requires_grad_()
        module.forward_backward(batch())
        assert [name for name, one in module.named_parameters() if one.grad is not None] == ["head.weight", "head.bias"]
        return empty

    first, second = on_ranks(net(), batch(), plan, body)
    assert first and second and not set(first) & set(second)


class Two(nn.Module):
    """Two outputs, each of layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers[1](self.layers[0](x)), self.layers[3](self.layers[2](x))


def test_what_no_used_output_needs_has_no_gradient_on_any_rank() -> None:
    x = torch.randn(4, 6)

    def body(module: Any) -> list[bool]:
        module(x)[1].square().mean().backward()
        return [one.grad is None for one in module.parameters()]

    assert on_ranks(Two(), (x,), "dp=2,spread", body, outputs="all") == [[True] * 4 + [False] * 4] * 2


@pytest.mark.parametrize("make", [torch.optim.Adafactor, lambda held: torch.optim.AdamW(held, foreach=True)])
def test_optimizers_pass_over_what_is_not_there(make: Any) -> None:
    def body(module: Any) -> bool:
        optimizer = make(list(module.parameters()))
        module.train_step(batch(), optimizer)
        return all(one.numel() and one.grad is not None for one in optimizer.state)

    assert all(on_ranks(net(), batch(), "dp=2,spread", body))


def test_masters_a_scaler_and_a_rank_of_empty_ones() -> None:
    """Under float16 the head alone is trained: one rank updates nothing."""
    model = Net().float().requires_grad_(False)
    model.head.requires_grad_()
    parallel = weft.parallelize(model, (batch()[0].float(),), PLANS[1], precision="fp16", emulate=True, cache=None)
    for rank in parallel.ranks:
        kinds = {(one.dtype, bool(one.numel())) for one in rank.head.parameters()}
        assert len(kinds) == 1 and kinds <= {(torch.float32, True), (torch.float32, False)}
    before = parallel.full_state_dict()
    optimizer, scaler = torch.optim.AdamW(parallel.parameters()), weft.GradScaler("cpu")
    parallel.train_step((batch()[0].float(),), optimizer, scaler=scaler)
    after = parallel.full_state_dict()
    assert [name for name, one in before.items() if not torch.equal(one, after[name])] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("plan", PLANS[:2])
def test_saved_and_loaded_under_another_plan(plan: str, tmp_path: Path) -> None:
    def opened(plan: str) -> tuple[Any, torch.optim.Optimizer]:
        parallel = weft.parallelize(net(), batch(), plan, emulate=True, cache=None)
        return parallel, torch.optim.AdamW(parallel.parameters(), lr=0.01)

    one, other = opened(plan), opened("dp=1")
    one[0].train_step(batch(0), one[1])
    weft.save(tmp_path, *one)
    for each in (one, other):
        weft.load(tmp_path, *each)
        each[0].train_step(batch(1), each[1])
    torch.testing.assert_close(one[0].full_state_dict(), other[0].full_state_dict(), **CLOSE)

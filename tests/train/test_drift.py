"""Ranks that hold the same parameter and change it differently: refused on all of them, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.pools import Pools
from tests.train import disagree
from tests.train.ranks import on_ranks
from tests.train.test_disagree import made
from tests.train.test_interrupted import batch, net
from weft.errors import WeftError
from weft.runtime.checks.settings import settings_for


def noise(module: Any, optimizer: Any, rank: int) -> None:
    draw = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype), alpha=1e-3)


def alone(module: Any, optimizer: Any, rank: int) -> None:
    if rank == 1:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.mul_(0.5 if name == "down.bias" else 1.0)


def by_data(module: Any, optimizer: Any, rank: int) -> None:
    for name, parameter in module.named_parameters():
        parameter.data.add_(1e-3 * rank * (name == "down.bias"))


def initialised(module: Any, optimizer: Any, rank: int) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(rank))


def loaded(module: Any, optimizer: Any, rank: int) -> None:
    if rank == 0:
        module.load_state_dict({name: one * 1.1 for name, one in module.state_dict().items()})


def rate(module: Any, optimizer: Any, rank: int) -> None:
    optimizer.param_groups[0]["lr"] *= 1 + rank


EDITS = [noise, alone, by_data, initialised, loaded, rate]


PIPELINE = "pp=2,dp=2,microbatches=2"
CASES = [
    *(("dp=2", edit, 5) for edit in EDITS),
    *(("dp=2", edit, 0) for edit in (by_data, rate)),
    ("tp=2", alone, 5),
    ("tp=2", by_data, 0),
    (PIPELINE, noise, 0),
    (PIPELINE, alone, 5),
]


@pytest.mark.parametrize(("plan", "edit", "start"), CASES)
def test_ranks_that_drift_apart(plan: str, edit: Any, start: int) -> None:
    """Every plan here has a parameter that two ranks hold, `down.bias` at least."""

    def body(module: Any) -> str:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for step in range(10):
            if step == start:
                edit(module, optimizer, module._transport.rank % 2)
            try:
                module.train_step(batch(step), optimizer)
            except WeftError as error:
                return f"{step} {error}"
        return "nothing"

    for told in on_ranks(net(), (batch(),), plan, body):
        assert "has other values on rank" in told and int(told.split()[0]) in ((0, 1) if start == 0 else (8,)), told


def decay(module: Any, optimizer: Any, rank: int) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.1 * rank


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,zero=3", "tp=2"])
@pytest.mark.parametrize("edit", [rate, decay])
def test_optimizers_that_are_set_otherwise(plan: str, edit: Any) -> None:
    """Shards of one parameter would be updated each in its own way, and no two ranks hold the same."""

    def body(module: Any) -> str:
        # nothing is replicated but what is left out here
        names = {
            name for name, one in module.named_parameters() if one.shape != module.program.stored_parts()[name].shape
        }
        trained = [one for name, one in module.named_parameters() if name in names]
        optimizer = torch.optim.SGD(trained, lr=1e-2)
        for step in range(10):
            if step == 3:
                edit(module, optimizer, module._transport.rank)
            optimizer.zero_grad()
            try:
                module(batch(step)).backward()
                optimizer.step()
            except WeftError as error:
                return f"{step} {error}"
        return "nothing"

    for told in on_ranks(net(), (batch(),), plan, body):
        assert "was set otherwise for" in told and int(told.split()[0]) <= 8, told


def test_what_one_rank_holds_may_be_any_other() -> None:
    """Every parameter has one owner for each of its elements."""

    def body(module: Any) -> None:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        noise(module, optimizer, module._transport.rank)
        for step in range(3):
            module.train_step(batch(step), optimizer)

    on_ranks(net(), (batch(),), "dp=2,zero=1", body)


def alike(module: Any, optimizer: Any, rank: int) -> None:
    """The same on all ranks, and something that one does and takes back."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9)
        if rank == 1:
            kept = module.get_parameter("down.bias").clone()
            module.get_parameter("down.bias").zero_()
            module.get_parameter("down.bias").copy_(kept)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3"])
def test_ranks_that_do_the_same_go_on(plan: str) -> None:
    def body(module: Any) -> None:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for step in range(10):
            alike(module, optimizer, module._transport.rank)
            module.train_step(batch(step), optimizer)

    on_ranks(net(), (batch(),), plan, body)


def test_before_it_is_saved_or_evaluated(pools: Pools) -> None:
    """Between two looks of training; on processes."""
    for told in pools(2).run(disagree.drifts, made("dp=2")):
        assert len(told) == 2 and all("has other values on rank" in one for one in told)


def test_noise_on_all_ranks_of_an_emulated_module() -> None:
    parallel: Any = weft.parallelize(net(), (batch(),), "dp=2", emulate=True, cache=None)
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.add_(torch.randn_like(parameter))
    with pytest.raises(WeftError, match="has other values on rank 1"):
        parallel(batch())


def test_a_group_may_get_other_parameters() -> None:
    """As many as before: tensors are compared element by element, and have no truth of their own."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    settings = settings_for(optimizer)
    settings.note(optimizer.param_groups)
    before = dict(settings.numbers)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(3))]
    settings.note(optimizer.param_groups)
    assert settings.numbers == before
    optimizer.param_groups[0]["lr"] = 0.2
    settings.note(optimizer.param_groups)
    assert settings.numbers != before

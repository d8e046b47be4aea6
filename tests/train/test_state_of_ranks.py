"""state_dict() of a rank: what it holds, loaded as it was given, and never mistaken for the model."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from tests.train.eager import gpt, mlp
from tests.train.ranks import on_ranks
from weft.errors import RunError


def opened(plan: str, body: Any) -> list[Any]:
    module, batch = gpt() if "pp" in plan else mlp()
    return on_ranks(module, batch, plan, body)


def refused(work: Any) -> None:
    with pytest.raises(RunError, match="has this rank's shards only") as caught:
        work()
    assert "full_state_dict()" in caught.value.remedy


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2"])
def test_one_ranks_part_is_not_saved_as_the_model(plan: str) -> None:
    def body(parallel: Any) -> None:
        state = parallel.state_dict()
        around = nn.Sequential(nn.Linear(2, 2), parallel).state_dict()
        refused(lambda: torch.save(state, io.BytesIO()))
        refused(lambda: torch.save({"model": {name: one.cpu().clone() for name, one in state.items()}}, io.BytesIO()))
        refused(lambda: torch.save(copy.deepcopy(around), io.BytesIO()))
        refused(lambda: safetensors.torch.save(dict(state)))
        torch.save(around["0.weight"], io.BytesIO())
        torch.save(parallel.local_state_dict(), io.BytesIO())
        assert all(type(one * 2) is Tensor for one in state.values())

    opened(plan, body)


def test_a_distributed_checkpoint_is_refused() -> None:
    def body(parallel: Any) -> None:
        for name, one in parallel.state_dict().items():
            refused(lambda name=name, one=one: _create_write_items(name, one))

    opened("tp=2", body)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2", "dp=2,zero=3"])
def test_what_a_rank_gives_it_takes(plan: str) -> None:
    def body(parallel: Any) -> None:
        before = copy.deepcopy(parallel.state_dict())
        with torch.no_grad():
            for one in parallel.parameters():
                one.zero_()
        parallel.load_state_dict(before)
        for state in (parallel.state_dict(), parallel.local_state_dict()):
            assert state.keys() == before.keys()
            assert all(torch.equal(one, before[name]) for name, one in state.items())

    opened(plan, body)


def test_a_rank_that_holds_all_gives_ordinary_tensors() -> None:
    kinds = opened("dp=2", lambda parallel: {type(one) for one in parallel.state_dict().values()})
    assert kinds == [{Tensor}, {Tensor}]

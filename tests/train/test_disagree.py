"""Ranks that disagree: told within seconds, as an error of ours on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.models import MLP
from tests.pools import Pools
from tests.train import disagree
from tests.train.eager import gpt
from weft.compile.model_file import Subject
from weft.compile.programs import Programs
from weft.errors import RunError
from weft.runtime.jobs.launch import ProcessFailed


def made(plan: str, module: nn.Module | None = None) -> tuple[Any, nn.Module, Any]:
    """A program's files, its model and a batch."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    model, batch = gpt(dropout=0.0) if "pp" in plan else (module or MLP().double(), {"x": x, "y": y})
    files = Programs(lambda module: Subject(model, batch), plan, None, cache=None, outputs="loss").training(model)
    return dict(files), model, batch


@pytest.mark.parametrize(
    ("what", "plan", "words"),
    [
        ("shape", "tp=2", "x of the batch is"),
        pytest.param("raises", "dp=2", "of the user's own", marks=pytest.mark.full),
        ("edits", "dp=2,spread", "gradients were changed on rank 1"),
    ],
)
def test_a_rank_that_goes_on_by_itself(what: str, plan: str, words: str, pools: Pools, tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed):
        pools(2).run(disagree.goes_on_after_an_error, (*made(plan), what, str(tmp_path)))
    mine, other = (Path(tmp_path, str(rank)).read_text() for rank in (1, 0))
    assert words in mine.splitlines()[0] and mine.startswith(f"1 {what != 'raises'} True")
    # the others hear of it where they next wait for it
    assert words in other.splitlines()[0] and other[1:].startswith(" True True") and other[0] in "12"


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("plan", ["dp=2,spread", "tp=2"])
def test_all_ranks_may_change_a_gradient_that_one_has(plan: str, in_place: bool, pools: Pools) -> None:
    """Who has no elements of it changes an empty one."""
    files, model, batch = made(plan)
    found = pools(2).run(disagree.edits_some, (files, model, batch, in_place))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(**batch).backward()
        disagree.halve(dict(model.named_parameters()), step, in_place)
        optimizer.step()
    for one in found:
        torch.testing.assert_close(one, dict(model.state_dict()), rtol=1e-12, atol=1e-13)


def test_all_emulated_ranks_may_change_a_gradient_that_one_has() -> None:
    _, model, batch = made("dp=2,spread")
    parallel = weft.parallelize(model, batch, "dp=2,spread", emulate=True, cache=None)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for alone in (False, True):
        optimizer.zero_grad()
        parallel(**batch).backward()
        each = [dict(rank.named_parameters()) for rank in parallel.ranks]
        first = next(name for name, one in each[0].items() if one.numel())
        # one rank all that it has, or all ranks one
        for one in each[0].values() if alone else [rank[first] for rank in each]:
            one.grad.mul_(0.5)
        with pytest.raises(RunError, match="different factors") if alone else nullcontext():
            optimizer.step()


@pytest.mark.parametrize(("what", "plan"), [("backward", "tp=2"), ("update", "dp=2")])
def test_a_rank_that_leaves_out_an_update(what: str, plan: str, pools: Pools, tmp_path: Path) -> None:
    """No collective is missed: only the number of updates tells."""
    with pytest.raises(ProcessFailed):
        pools(2).run(disagree.leaves_out, (*made(plan), what, str(tmp_path)))
    for rank in range(2):
        told = Path(tmp_path, str(rank)).read_text()
        assert told.startswith("True") and "rank 1 has made 3 updates, rank 0 4" in told, told


def test_errors_that_all_raise_end_nothing(pools: Pools) -> None:
    for found in pools(2).run(disagree.errors_of_all, made("tp=2")):
        assert len(found) == 2
        assert "x of the batch is" in found[0] and "were given different batches" in found[1]


def test_replicas_that_are_fed_the_same_are_warned_of(pools: Pools) -> None:
    warned, quiet = pools(2).run(disagree.replicas, (*made("dp=1"), True))
    assert len(warned) == 1 and "DistributedSampler" in warned[0] and not quiet
    assert pools(2).run(disagree.replicas, (*made("dp=1"), False)) == [[], []]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.a(self.norm(x)) - y).square().mean()


def test_statistics_of_replicas_are_warned_of(pools: Pools) -> None:
    warned, quiet = pools(2).run(disagree.replicas, (*made("dp=1", Normed().double()), False))
    assert len(warned) == 1 and "batch norm" in warned[0] and not quiet


def test_a_replica_without_a_batch_in_the_first_step(pools: Pools) -> None:
    given = made("pp=2,microbatches=2")
    # alone, the first replica does the same: both have its batch in the second step
    alone, found = pools(2).run(disagree.none_at_first, given), pools(4).run(disagree.none_at_first, given)
    for rank, state in enumerate(found):
        wanted = alone[rank % 2]
        assert state.keys() == wanted.keys()
        for name, one in state.items():
            torch.testing.assert_close(one, wanted[name], rtol=1e-12, atol=1e-13)

"""Values of parameters that a rank holds in part: full ones are cut, or refused with what cuts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.train.ranks import on_ranks
from tests.train.test_shards import PLANS, Net, batch, gradients, net, opened, original, shards
from weft.errors import RunError


@pytest.mark.parametrize("plan", PLANS)
def test_full_values_in_place_of_a_part_are_refused(plan: str) -> None:
    parallel, full = opened(plan), dict(net().named_parameters())
    for name, one in shards(parallel):
        whole = full[original(name)].detach()
        if whole.shape == one.shape or (whole.numel() == 1 and not one.numel()):
            continue  # the other ranks hold nothing of it; one element goes with any shape
        for wrong in (lambda one=one, whole=whole: one.copy_(whole), lambda one=one, whole=whole: whole.copy_(one)):
            with pytest.raises(RunError, match=r"belong together(.|\n)*weft\.shard_like"), torch.no_grad():
                wrong()
        for kind in ("grad", "data"):
            with pytest.raises(RunError, match=r"weft\.shard_like"):
                setattr(one, kind, whole)


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=3"])
def test_a_full_state_dict_on_one_rank_is_refused(plan: str) -> None:
    def body(module: Any) -> None:
        for load in (module.load_state_dict, lambda state: nn.Sequential(module).load_state_dict(state)):
            state = net().state_dict()
            given = state if load == module.load_state_dict else {f"0.{name}": one for name, one in state.items()}
            with pytest.raises(RunError, match=r"up\.weight is given with shape \[8, 6\](.|\n)*weights="):
                load(given)

    on_ranks(net(), batch(), plan, body)


class Normed(Net):
    """Buffers too, of which a stage may hold none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.BatchNorm1d(6).double(), nn.BatchNorm1d(5).double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * self.last(self.down(self.up(self.first(x)).tanh()))).square().mean()


def names_below(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): one for name, one in state.items() if name.startswith(prefix)}


@pytest.mark.filterwarnings("ignore:.*batch norm")
@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=3", "dp=2,spread", "pp=2,microbatches=2"])
def test_full_values_go_back_as_the_error_says(plan: str) -> None:
    torch.manual_seed(0)
    model = Normed()

    def body(module: Any) -> list[str]:
        held, full, told = dict(module.named_parameters()), module.full_state_dict(), []
        gradients(module)
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        for load, prefix in ((module.load_state_dict, ""), (module.down.load_state_dict, "down.")):
            try:
                load(names_below(full, prefix))
            except RunError as error:
                assert "weft.shard_like(full[name], p)" in error.remedy and "running_mean" in error.remedy
                told.append(error.message)
        with torch.no_grad():
            for name, one in held.items():
                one.copy_(weft.shard_like(full[name], one))
            for name in (one for one in full if one.startswith(("first.", "last.")) and one not in held):
                setattr(module.get_submodule(name.partition(".")[0]), name.partition(".")[2], full[name])
        found = module.full_state_dict()
        for name, one in full.items():
            assert torch.equal(found[name], one), name
        return told

    told = on_ranks(model, batch(), plan, body)
    # of a submodule one rank may have all
    assert all(told) and max(map(len, told)) == 2
    if "pp" in plan:
        assert any("holds nothing of first.running_mean" in one[0] for one in told)


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "dp=2,spread"])
def test_parts_of_another_submodule_are_loaded_or_refused(plan: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)).square().mean()

    def body(module: Any) -> None:
        if "zero" in plan:
            module.b.load_state_dict(module.a.state_dict())
            full = module.full_state_dict()
            assert torch.equal(full["a.weight"], full["b.weight"])
        else:
            with pytest.raises(RunError, match=r"weft\.shard_like"):
                module.b.load_state_dict(module.a.state_dict())

    on_ranks(Two(), batch(), plan, body)

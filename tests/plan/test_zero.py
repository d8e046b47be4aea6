"""ZeRO as lines of a plan: over all replicas or in groups of them, for all parameters or by pattern."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.plan.graphs import gpt_graph, mlp_graph
from weft.capture import capture
from weft.errors import PlanError
from weft.ir.graph import Graph
from weft.lower import stored_parameters
from weft.plan import Plan, cut, dp, load_plan, save_plan, zero


def elements(plan: Plan) -> list[int]:
    """Of parameters as they are stored, on each device."""
    found = [0] * plan.devices
    for layout in stored_parameters(plan).values():
        for part in layout.parts():
            found[part.device] += math.prod(part.shape)
    return found


def whole(graph: Graph) -> int:
    return sum(math.prod(graph.tensors[one.tensor].sizes) for one in graph.parameters)


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [("dp=4", 4), ("dp=4,zero_groups=1", 4), ("dp=4,zero_groups=2", 2), ("dp=3", 3)],
)
def test_a_group_holds_everything_once(recipe: str, parts: int) -> None:
    graph = gpt_graph()
    plan = load_plan(f"{recipe},zero=3", graph)
    held = elements(plan)
    groups = [held[start : start + parts] for start in range(0, plan.devices, parts)]
    # each group once: nothing is padded
    assert [sum(group) for group in groups] == [whole(graph)] * len(groups)
    assert groups == [groups[0]] * len(groups)
    assert max(held) == pytest.approx(whole(graph) / parts, rel=0.07)


def test_groups_hold_the_same_parts_next_to_tensor_parallelism() -> None:
    plan = load_plan("dp=4,tp=2,zero=3,zero_groups=2", gpt_graph())
    for layout in stored_parameters(plan).values():
        ranges = {part.device: part.ranges for part in layout.parts()}
        # device = replica * 2 + tp: replicas 0 and 2 are the first ones of their groups
        assert all(ranges[device] == ranges[device + 4] for device in range(4))
        assert sum(math.prod(part.shape) for part in layout.parts() if part.device < 4) >= math.prod(layout.shape)


def test_a_part_is_cut_along_a_dim_that_shares_it_out_evenly() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.few, self.many = nn.Parameter(torch.ones(4, 100)), nn.Parameter(torch.ones(100, 4))
            self.odd = nn.Parameter(torch.ones(2, 5))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.few @ self.many).sum() + self.odd.sum()

    graph = capture(Experts(), torch.zeros(6, 4))
    stores = load_plan("dp=3,zero=3", graph).stores
    dims = {graph.parameter_tensors[tensor].names[0]: store.uses[0].use.name for tensor, store in stores.items()}
    # 2, 1 and 1 experts would be half of them on one device
    assert dims == {"few": "1", "many": "0", "odd": "1"}


def test_a_pattern_names_modules_too() -> None:
    graph = gpt_graph()
    names = [one.names[0] for one in graph.parameters]
    block = next(name for name in names if ".0." in name).split(".0.")[0]
    plan = load_plan(f"dp=2,zero=3,zero_parameters={block}.*", graph)
    stored = {graph.parameter_tensors[tensor].names[0] for tensor in plan.stores}
    assert stored == {name for name in names if name.startswith(f"{block}.")} < set(names)


@pytest.mark.parametrize("pattern", ["up.*", "up", "up.weight|up.bias"])
def test_by_pattern(pattern: str) -> None:
    graph = mlp_graph()
    plan = load_plan(f"dp=2,zero=3,zero_parameters={pattern}", graph)
    stored = {graph.parameter_tensors[tensor].names[0] for tensor in plan.stores}
    assert stored == {"up.weight", "up.bias"}
    # what is stored already is left as it is
    rest = zero(plan, 1)
    kept = {graph.parameter_tensors[tensor].names[0] for tensor, store in rest.stores.items() if store.kept}
    assert kept and kept.isdisjoint(stored)
    assert {one.names[0] for one in graph.parameters} == kept | stored


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plan_file_keeps_groups(stage: int, tmp_path: Path) -> None:
    graph = mlp_graph()
    plan = zero(dp(Plan(graph, 4), 4), stage, groups=2)
    save_plan(plan, tmp_path / "plan.yaml")
    assert load_plan(str(tmp_path / "plan.yaml"), graph) == plan
    assert "copies: 2" in (tmp_path / "plan.yaml").read_text()
    assert "copies 2 (dp)" in str(plan)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("dp=4,zero=2,zero_groups=3", ("zero_groups=3", "dp=4 replicas", "zero_groups=1 or 2")),
        ("dp=4,zero=2,zero_groups=4", ("4 groups of several", "zero_groups=1 or 2")),
        ("dp=4,zero=2,zero_groups=8", ("8 groups of several", "zero_groups=1 or 2")),
        ("dp=1,zero=2,zero_groups=2", ("dp=1 replicas", "zero_groups=1")),
        ("dp=4,zero=2,zero_groups=0", ("zero_groups=0 is no degree",)),
        ("dp=4,zero_groups=2", ("there is no zero", "dp=4,zero=2,zero_groups=2")),
        ("dp=4,zero_parameters=up.*", ("there is no zero", "zero_parameters=up.*")),
        ("dp=4,zero=1,zero_parameters=h.*", ("'h.*' matches no parameter", "patterns name parameters")),
        ("tp=2,zero=2,zero_groups=2", ("there is no dp", "dp=4,tp=2,zero=2,zero_groups=2")),
    ],
)
def test_refused(recipe: str, words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as raised:
        load_plan(recipe, mlp_graph())
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "recipe" in (raised.value.place or ""), raised.value.place


def test_copies_are_for_stored_parameters() -> None:
    plan = dp(Plan(mlp_graph(), 4), 4)
    with pytest.raises(PlanError, match=r"copies, which are for stored(.|\n)*copy\(2\)"):
        plan.trans("up", cut("n", 2, "tp", copies=2))
    with pytest.raises(PlanError, match="cannot make 0 copies"):
        cut(0, 2, "dp", copies=0)
    with pytest.raises(PlanError, match="axis 'dp' has 4 parts elsewhere in the plan, here 6"):
        plan.store("up.weight", cut(0, 3, "dp", copies=2))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parts_keep_names_and_dims(stage: int) -> None:
    class Odd(nn.Module):
        """Sizes that two do not divide, one that stays whole, a number."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(9, 11), nn.Linear(11, 9, bias=False)
            self.scale, self.one = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.down(self.up(x).tanh()) * self.scale * self.one).sum()

    module = Odd()
    recipe = f"dp=4,zero={stage},zero_groups=2"
    parallel = weft.parallelize(Odd(), (torch.ones(4, 9),), plan=recipe, emulate=True, cache=None)
    dims = {name: one.ndim for name, one in module.named_parameters()}
    for rank in parallel.ranks:
        assert {name: one.ndim for name, one in rank.named_parameters()} == dims
    rows = [[tuple(one.shape) for one in rank.parameters() if one.ndim == 2] for rank in parallel.ranks]
    assert rows == [[(1, 1), (6, 9), (5, 11)], [(1, 1), (5, 9), (4, 11)]] * 2

"""Megatron, sequence parallelism and stored parts: what they decide, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.plan.graphs import gpt_graph, grouped_graph, layers, mlp_graph
from tests.plan.test_recipes import MEGATRON, cuts
from weft.capture import capture
from weft.errors import PlanError
from weft.ir.oplayout import Cut
from weft.plan import Plan, dp, megatron, sp, tp, zero
from weft.plan.follow import resolve


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_by_the_book(parts: int, tied: bool) -> None:
    found = cuts(megatron(Plan(gpt_graph(tied=tied), parts), parts), "tp")
    for layer in range(2):
        for op, name in MEGATRON.items():
            assert found[f"transformer.h.{layer}.{op}"] == name
        assert f"transformer.h.{layer}/add" not in found and f"transformer.h.{layer}.ln_1/layer_norm" not in found
    assert found["lm_head/linear"] == "n" and found["cross_entropy_loss"] == "c"
    # other than with tp, a table of its own is cut too; positions never are
    assert "transformer.wte/embedding" in found and "transformer.wpe/embedding" not in found


def test_too_few_heads() -> None:
    with pytest.raises(PlanError, match="has 4 heads: they cannot be cut into 8 parts") as caught:
        megatron(Plan(gpt_graph(), 8), 8)
    assert "into 2 or 4 parts" in caught.value.remedy and caught.value.place


def test_few_key_heads_stay_whole() -> None:
    four = cuts(megatron(Plan(grouped_graph(), 4), 4), "tp")
    assert four["q/linear"] == "n" and four["o/linear"] == "k" and "k/linear" not in four and "v/linear" not in four


def test_hidden_units_without_attention() -> None:
    assert cuts(megatron(Plan(mlp_graph(), 2), 2), "tp")["up/linear"] == "n"
    with pytest.raises(PlanError, match="megatron=9"):
        megatron(Plan(layers(), 9), 9)


@pytest.mark.parametrize("recipe", [tp, megatron])
def test_between_the_blocks_the_sequence_is_cut(recipe) -> None:
    graph = gpt_graph()
    plan = sp(recipe(Plan(graph, 2), 2))
    found = cuts(plan, "tp")
    assert found["transformer.h.0.ln_1/layer_norm"] == "b1" and found["transformer.h.0/add"] == "d1"
    layouts = resolve(plan, plan.rules)
    stream = [op.name for op in graph.ops if op.path.startswith("transformer.h.")]
    assert all(isinstance(use, Cut) for name in stream for use in layouts[name].uses)


class Rows(nn.Module):
    """No sequence: a batch of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def test_nothing_to_cut_along_a_sequence() -> None:
    graph = capture(Rows(), torch.zeros(4, 8))
    with pytest.raises(PlanError, match="has no sequence dim") as caught:
        sp(tp(Plan(graph, 2), 2))
    assert "leave out sp" in caught.value.remedy
    with pytest.raises(PlanError, match="no op is cut along 'tp'"):
        sp(dp(Plan(graph, 2), 2))


def test_parameters_in_parts() -> None:
    graph = gpt_graph()
    plan = zero(dp(Plan(graph, 4), 4))
    assert len(plan.stores) == len(graph.parameters)
    assert {use.size for store in plan.stores.values() for use in store.uses} == {4}
    with pytest.raises(PlanError, match="no op is cut along 'dp'"):
        zero(tp(Plan(graph, 2), 2))
    for stage, reduced in ((1, False), (2, True)):
        stores = zero(dp(Plan(graph, 2), 2), stage).stores.values()
        assert all(one.kept and one.reduced == reduced and not one.uses for one in stores)
    with pytest.raises(PlanError, match="zero=4 is no stage"):
        zero(dp(Plan(graph, 2), 2), 4)

"""Parameters that lie whole on one device each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan.graphs import gpt_graph, layers, mlp_graph
from weft.errors import PlanError
from weft.ir.graph import Graph
from weft.lower import stored_parameters
from weft.plan import Plan, cut, load_plan, save_plan, spread


def bytes_of(graph: Graph, tensor: str) -> int:
    size = graph.tensors[tensor].dtype.itemsize
    for one in graph.tensors[tensor].sizes:
        size *= one
    return size


def loads(plan: Plan) -> list[int]:
    """Bytes on each device."""
    found = [0] * plan.devices
    for tensor, store in plan.stores.items():
        if store.devices is not None:
            (device,) = store.devices
            found[device] += bytes_of(plan.graph, tensor)
    return found


def test_every_parameter_lies_on_one_device_and_bytes_are_balanced() -> None:
    graph = gpt_graph()
    plan = load_plan("dp=2,tp=2,spread", graph)
    trained = {one.tensor for one in graph.parameters if one.trainable}
    assert set(plan.stores) == trained
    largest = max(bytes_of(graph, tensor) for tensor in trained)
    held = loads(plan)
    assert sum(held) == sum(bytes_of(graph, tensor) for tensor in trained)
    assert max(held) - min(held) <= largest
    assert plan == load_plan("dp=2,tp=2,spread", graph)


def test_the_rest_follows_zero() -> None:
    graph = mlp_graph()
    plan = load_plan("dp=2,zero=3,spread=matrices", graph)
    for tensor, store in plan.stores.items():
        assert (store.devices is not None) == (len(graph.tensors[tensor].sizes) > 1), tensor
    lies = stored_parameters(plan)
    assert {name: len(layout.grid.devices) for name, layout in lies.items()} == {
        one.tensor: 1 if len(graph.tensors[one.tensor].sizes) > 1 else 2 for one in graph.parameters
    }


def test_stages_keep_their_own() -> None:
    graph = layers(num_layers=4)
    plan = load_plan("pp=2,tp=2,stages=layers.2,spread", graph)
    # devices are counted from 0 inside a stage
    assert {name: store.devices for name, store in plan.stores.items()} == {
        "w0": (0,),
        "w1": (1,),
        "w2": (0,),
        "w3": (1,),
    }
    assert not load_plan("pp=2,stages=layers.2,spread", graph).stores


def test_by_pattern() -> None:
    graph = gpt_graph()
    plan = load_plan("dp=2,spread=**.c_attn.weight", graph)
    names = {graph.parameter_tensors[tensor].names[0] for tensor in plan.stores}
    assert names and all(name.endswith("c_attn.weight") for name in names)
    with pytest.raises(PlanError, match="matches no parameter"):
        load_plan("dp=2,spread=nothing.*", graph)


def test_a_plan_file_has_it(tmp_path: Path) -> None:
    graph = mlp_graph()
    plan = load_plan("dp=2,spread", graph)
    save_plan(plan, tmp_path / "plan.yaml")
    again = load_plan(str(tmp_path / "plan.yaml"), graph)
    assert again == plan and "whole on 1" in str(again)


def test_what_contradicts_itself_is_refused() -> None:
    plan = Plan(mlp_graph(), 2)
    for wrong in ([2], [], [0, 0], [-1]):
        assert "devices 0 to 1" in plan.can_store("up.weight", on=wrong).reason
    assert "not cut as well" in plan.can_store("up.weight", cut(0, 2, "dp"), on=0).reason
    assert not plan.store("up.weight", on=0).can_store("up.weight", on=1)
    assert spread(Plan(mlp_graph(), 1)).stores == {}

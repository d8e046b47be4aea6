"""Selections: patterns, set operations, text that reads back."""

from __future__ import annotations

import random

import pytest

from tests.plan.graphs import gpt_graph, layers, odd_graph
from weft.errors import PlanError
from weft.plan import Plan, Selection, match
from weft.plan.select import match_parameters, parse, select

GRAPH = layers()


def names(selection: Selection) -> list[str]:
    return [op.name for op in selection]


@pytest.mark.parametrize(
    ("pattern", "op", "expected"),
    [
        ("layers.*", None, ["layers.0/relu", "layers.1/relu", "layers.2/relu"]),
        ("layers.1.**", None, ["layers.1.fc/linear", "layers.1/relu"]),
        ("layers.[02].fc", None, ["layers.0.fc/linear", "layers.2.fc/linear"]),
        ("**.fc", "linear", ["layers.0.fc/linear", "layers.1.fc/linear", "layers.2.fc/linear"]),
        ("layers.0.**", "aten.relu.default", ["layers.0/relu"]),
        ("layers.0.**", ("relu", "linear"), ["layers.0.fc/linear", "layers.0/relu"]),
        ("layers.2/relu", None, ["layers.2/relu"]),
        ("layers.*/l*", None, []),
        ("layers.*.fc/l*", "linear", ["layers.0.fc/linear", "layers.1.fc/linear", "layers.2.fc/linear"]),
        ("layers", None, []),
    ],
)
def test_patterns(pattern: str, op: str | None, expected: list[str]) -> None:
    assert names(match(GRAPH, pattern, op=op)) == expected


def test_calls_are_those_of_the_innermost_module() -> None:
    graph = odd_graph()
    assert names(match(graph, "act")) == ["act/relu", "act@1/relu"]
    assert names(match(graph, "act@1")) == ["act@1/relu"]
    assert names(match(graph, "act@0")) == ["act/relu"]
    with pytest.raises(PlanError, match="call of an outer module"):
        match(graph, "act@1.**")


def test_where_and_set_operations() -> None:
    linear, first = match(GRAPH, op="linear"), match(GRAPH, "layers.0.**")
    assert names(linear - first) == ["layers.1.fc/linear", "layers.2.fc/linear"]
    assert names(linear & first) == ["layers.0.fc/linear"]
    assert names(first | linear) == [
        "layers.0.fc/linear",
        "layers.0/relu",
        "layers.1.fc/linear",
        "layers.2.fc/linear",
    ]
    late = match(GRAPH, where=lambda op: op.source.line > 1)
    assert names(late) == ["layers.1.fc/linear", "layers.2.fc/linear"]
    assert late == linear - first and hash(late) == hash(linear - first)
    assert late.text == "layers.1.fc/linear | layers.2.fc/linear"
    assert "layers.1.fc/linear" in late and len(late) == 2


def test_text_folds_layers() -> None:
    assert select(GRAPH, match(GRAPH, op="linear").names).text == "layers.*.fc/linear"
    assert select(GRAPH, ["layers.0/relu"]).text == "layers.0/relu"


@pytest.mark.parametrize("graph", [GRAPH, odd_graph(), gpt_graph()], ids=["layers", "odd", "gpt"])
def test_text_reads_back(graph) -> None:
    generator = random.Random(0)
    everything = [op.name for op in graph.ops]
    patterns = ["**", "** op=linear,relu", "layers.*", "*", "**.fc | act@1"]
    for _ in range(40):
        listed = select(graph, generator.sample(everything, generator.randint(1, len(everything))))
        assert parse(graph, listed.text) == listed
        made = parse(graph, generator.choice(patterns))
        for _ in range(generator.randint(1, 4)):
            other = parse(graph, generator.choice(patterns))
            made = generator.choice([made.__or__, made.__sub__, made.__and__, other.__sub__])(other)
        assert made.expression and parse(graph, made.text) == made


@pytest.mark.parametrize("text", ["", "a |", "( a", "a b", "| a", "a )", "'a"])
def test_malformed_text(text: str) -> None:
    with pytest.raises(PlanError, match="no selection of ops"):
        parse(GRAPH, text)


def test_nothing_matched_lists_near_ones() -> None:
    plan = Plan(GRAPH, 1)
    with pytest.raises(PlanError, match=r"layer\.\*\.fc matches no op of Layers") as caught:
        plan.select("layer.*.fc")
    assert "layers.*.fc" in caught.value.remedy
    with pytest.raises(PlanError) as caught:
        plan.select(plan.match(op="liner"))
    assert "op=linear" in caught.value.remedy


def test_what_a_plan_accepts_as_ops() -> None:
    plan = Plan(GRAPH, 1)
    op = GRAPH.ops[0]
    same = plan.select("layers.0.fc")
    assert (
        same == plan.select(op) == plan.select(op.name) == plan.select([op]) == plan.select(plan.match("layers.0.fc"))
    )
    assert plan.select(["layers.0.fc", GRAPH.ops[1]]) == plan.select("layers.0.**")
    with pytest.raises(PlanError):
        plan.select(["layers.0.fc", "nothing"])
    with pytest.raises(PlanError, match="selected in another graph"):
        plan.select(match(odd_graph(), "act"))


def test_parameters() -> None:
    graph = gpt_graph()
    head = match_parameters(graph, "lm_head.weight")
    assert head == match_parameters(graph, "transformer.wte.weight")
    assert len(match_parameters(graph, "transformer.h.*.mlp.**").tensors) == 8
    assert match_parameters(graph, graph.parameters[0]).tensors == (graph.parameters[0].tensor,)
    assert len(match_parameters(graph, ["lm_head.*", "transformer.wpe.*"]).tensors) == 2
    with pytest.raises(PlanError, match="matches no parameter") as caught:
        match_parameters(graph, "lm_haed.weight")
    assert "lm_head.weight" in caught.value.remedy

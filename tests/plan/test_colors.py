"""Colors: which names and dims are one logical dim, and how its units lie inside each."""

from __future__ import annotations

import pytest

from tests.plan.graphs import gpt_graph, grouped_graph, layers, odd_graph
from weft.ir.oplayout import Cut, cut_table
from weft.ops.book import RuleBook
from weft.ops.rule import Dim, dim, dim_ranges
from weft.plan import Plan
from weft.plan.colors import Color, Colors, OpName, TensorDim, expand, find_colors, refinement


def colors_of(graph, parts: int = 2) -> Colors:
    return find_colors(graph, RuleBook(graph), parts)


def at(colors: Colors, op: str, name: str) -> Color:
    found = colors.at(OpName(op, name))
    assert found is not None, (op, name)
    return found


def test_expand() -> None:
    assert expand(dim("n"), "n", (4, 4), {"n": 8}) == (4, 4)
    assert expand(dim("h", "d"), "d", (8,), {"h": 2, "d": 8}) == (8, 8)
    assert expand(Dim((("n", 4), ("n", 1), ("n", 1))), "n", (2,), {"n": 2}) == (8, 2, 2)
    assert expand(Dim((("n",), (4,))), "n", (2,), {"n": 2}) is None


def test_refinement() -> None:
    assert refinement((192,), 192, (64, 64, 64)) == (64, 64, 64)
    assert refinement((8, 8), 4, (4, 4, 4, 4)) == (2, 2)
    assert refinement((64,), 4, (24, 40)) is None  # finer than a unit
    assert refinement((6, 6), 6, (4, 4, 4)) is None
    assert refinement((4, 8), 4, (4, 8)) == (4,)


def test_heads_of_a_fused_projection() -> None:
    graph = gpt_graph()
    colors = colors_of(graph)
    attention = "transformer.h.0.attn"
    heads = at(colors, f"{attention}.c_attn/linear", "n")
    assert heads.units == 4
    member = heads.members.get(f"{attention}.c_attn/linear")
    assert member is not None and member.groups == (16, 16, 16)
    assert heads is at(colors, f"{attention}.c_proj/linear", "k")
    assert heads is not at(colors, "transformer.h.1.attn.c_attn/linear", "n")
    # the cut of each op's name leaves every tensor between them as it is
    weight = graph.by_name[f"{attention}.c_attn/linear"].inputs[1]
    assert heads.dims[weight] == (0,)
    table = cut_table([Cut("n", (1, 1), member.groups, member.units)])
    assert table[0] == ((0, 8), (16, 24), (32, 40))


def test_hidden_dim_and_residual_are_different() -> None:
    colors = colors_of(gpt_graph())
    hidden = at(colors, "transformer.h.0.mlp.c_fc/linear", "n")
    assert hidden.units == 64 and next(iter(hidden.members)) == "transformer.h.0.mlp.c_fc/linear"
    assert set(hidden.members) == {
        "transformer.h.0.mlp.c_fc/linear",
        "transformer.h.0.mlp.gelu/gelu",
        "transformer.h.0.mlp.c_proj/linear",
    }
    residual = at(colors, "transformer.h.0.mlp.c_fc/linear", "k")
    assert residual is at(colors, "transformer.h.1.mlp.c_proj/linear", "n")


def test_vocabulary_is_one_color_if_tied() -> None:
    tied, untied = colors_of(gpt_graph(tied=True)), colors_of(gpt_graph(tied=False))
    name = "transformer.wte/embedding"
    assert at(tied, name, "v") is at(tied, "lm_head/linear", "n") is at(tied, "cross_entropy_loss", "c")
    assert at(untied, name, "v") is not at(untied, "lm_head/linear", "n")


def test_batch_passes_through_merged_dims() -> None:
    graph = gpt_graph()
    colors = colors_of(graph)
    batch = colors.at(TensorDim(graph.inputs[0].tensor, 0))
    assert batch is not None and batch.units == 4
    rows = batch.members.get("cross_entropy_loss")
    assert rows is not None and rows.groups == (32,) and rows.units == 4


def test_links_that_leave_too_few_units_are_not_made() -> None:
    graph = grouped_graph()
    two, four = colors_of(graph, 2), colors_of(graph, 4)
    assert at(two, "q/linear", "n") is at(two, "k/linear", "n")
    assert at(two, "q/linear", "n").units == 2
    heads = at(four, "q/linear", "n")
    assert heads.units == 4 and heads is at(four, "o/linear", "k")
    assert heads is not at(four, "k/linear", "n")


def test_one_name_of_two_is_cut() -> None:
    """Rows and columns of attention scores are both the sequence: the one that leaves the op goes first."""
    graph = grouped_graph()
    colors = colors_of(graph)
    sequence = colors.at(TensorDim(graph.inputs[0].tensor, 1))
    assert sequence is not None
    twice = {op: members for op, members in sequence.names.items() if len(members) > 1}
    assert twice
    for op, members in twice.items():
        assert members[0].cuttable
        outputs = {name for dims in Plan(graph, 1).rule(op).outputs for one in dims for name in one.names}
        assert members[0].name in outputs


def test_frozen_and_talking_names_are_marked() -> None:
    colors = colors_of(odd_graph())
    color = at(colors, "softmax", "d1")
    assert color is at(colors, "sort", "d1")
    assert not color.names["sort"][0].cuttable and "sort" not in color.members
    assert color.names["softmax"][0].cuttable and color.names["softmax"][0].talks


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("graph", [layers(), gpt_graph(), grouped_graph(), odd_graph()], ids=lambda g: g.name)
def test_members_agree_about_every_tensor(graph, parts: int) -> None:
    """For each color and op: cutting its name leaves every tensor dim of the color in the color's own ranges."""
    rules = RuleBook(graph)
    for color in find_colors(graph, rules, parts):
        assert color.units >= parts
        for op_name, members in color.names.items():
            op, rule = graph.by_name[op_name], rules.rule(graph.by_name[op_name])
            for member in members:
                table = cut_table([Cut(member.name, (1,) * parts, member.groups, member.units)])
                for tensor, dims in zip((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), strict=True):
                    for position, one in enumerate(dims):
                        groups = color.nodes.get(TensorDim(tensor, position))
                        if groups is None or member.name not in one.names:
                            continue
                        expected = cut_table([Cut("dim", (1,) * parts, groups, color.units)])
                        made = tuple(dim_ranges(one, {member.name: ranges}, rule.sizes) for ranges in table)
                        assert made == expected, (op_name, member, tensor, position)

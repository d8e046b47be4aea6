"""Recipes: what dp, tp, coshard and recompute decide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.plan.graphs import gpt_graph, grouped_graph, layers, mlp_graph, odd_graph
from weft.capture import capture
from weft.errors import PlanError
from weft.ir.oplayout import Copied, Cut
from weft.ops.book import RuleBook
from weft.ops.work import multiplications
from weft.plan import Plan, copy, coshard, dp, tp
from weft.plan.recipes.basic import recompute
from weft.plan.recipes.weigh import weigh


def cuts(plan: Plan, axis: str) -> dict[str, str]:
    """What each op that has the axis does with it."""
    found = {}
    for op, decision in plan.decisions.items():
        one = decision.axis(axis)
        if one is not None:
            found[op] = one.use.name if isinstance(one.use, Cut) else "copy"
    return found


def test_dp_tells_every_op() -> None:
    graph = gpt_graph()
    found = cuts(dp(Plan(graph, 3), 3), "dp")
    assert set(found) == set(graph.by_name)
    assert {op for op, name in found.items() if name == "copy"} == {"arange", "transformer.wpe/embedding"}
    assert found["cross_entropy_loss"] == "n" and found["lm_head/linear"] == "b0"


def test_dp_leaves_inputs_without_a_batch_alone() -> None:
    found = cuts(dp(Plan(odd_graph(), 2), 2), "dp")
    assert set(found.values()) == {"d0"} and set(found) == set(odd_graph().by_name)


def test_dp_by_other_dims() -> None:
    graph = odd_graph()
    inputs = graph.inputs
    plan = dp(Plan(graph, 2), 2, batch_dims=[1, 1, 1])
    assert cuts(plan, "dp")["softmax"] == "d1" and cuts(plan, "dp")["sort"] == "copy"
    same = dp(Plan(graph, 2), 2, batch_dims={one.where: -1 for one in inputs})
    assert plan == same
    assert dp(Plan(graph, 2), 2, batch_dims=[0, 0, None]) == dp(Plan(graph, 2), 2)


@pytest.mark.parametrize(
    ("batch_dims", "parts", "message"),
    [
        (None, 5, "cannot cut a batch of 4 into 5 parts"),
        (None, 0, "dp=0 is no number of parts"),
        ([0, 0], 2, "2 batch dims for 3 tensor inputs"),
        ([0, 0, 0], 2, "differ in size"),
        ([0, 7, None], 2, "has no dim 7"),
        ([None, None, None], 2, "no input with a batch dim"),
        ({"nothing": 0}, 2, "'nothing' is no tensor input"),
    ],
)
def test_dp_refuses(batch_dims, parts: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        dp(Plan(odd_graph(), 2), parts, batch_dims=batch_dims)


MEGATRON = {
    "attn.c_attn/linear": "n",
    "attn.c_proj/linear": "k",
    "mlp.c_fc/linear": "n",
    "mlp.gelu/gelu": "d2",
    "mlp.c_proj/linear": "k",
}


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_tp_of_a_transformer_is_megatrons(parts: int, tied: bool) -> None:
    plan = tp(Plan(gpt_graph(tied=tied), parts), parts)
    found = cuts(plan, "tp")
    for layer in range(2):
        for op, name in MEGATRON.items():
            assert found[f"transformer.h.{layer}.{op}"] == name
        assert f"transformer.h.{layer}/add" not in found and f"transformer.h.{layer}.ln_1/layer_norm" not in found
    assert found["lm_head/linear"] == "n" and found["cross_entropy_loss"] == "c"
    assert ("transformer.wte/embedding" in found) == tied
    assert "copy" not in found.values()
    fused = plan.decisions["transformer.h.0.attn.c_attn/linear"].uses[0].use
    assert fused == Cut("n", (1,) * parts, (16, 16, 16), 4)


def test_tp_with_few_key_heads_cuts_what_it_can() -> None:
    two, four = (cuts(tp(Plan(grouped_graph(), n), n), "tp") for n in (2, 4))
    assert all(two[op] == name for op, name in {"q/linear": "n", "k/linear": "n", "o/linear": "k"}.items())
    # key heads do not suffice for four parts: heads are cut in attention only, keys and values resharded before it
    assert four["matmul"] == two["matmul"] and "expand" in two and "expand" not in four
    assert {op for op in two if "linear" in op} <= {op for op in four if "linear" in op}


def test_tp_takes_every_other_hidden_dim() -> None:
    found = cuts(tp(Plan(layers(width=32, num_layers=4), 2), 2), "tp")
    assert [found[f"layers.{i}.fc/linear"] for i in range(4)] == ["n", "k", "n", "k"]
    assert "layers.1/relu" not in found


def test_tp_cuts_something_however_small() -> None:
    assert cuts(tp(Plan(layers(width=2, num_layers=1), 2), 2), "tp")["layers.0.fc/linear"] == "n"


def test_tp_with_a_batch_of_one() -> None:
    assert cuts(tp(Plan(layers(batch=1, num_layers=2), 2), 2), "tp") == {
        "layers.0.fc/linear": "n",
        "layers.0/relu": "d1",
        "layers.1.fc/linear": "k",
    }
    with pytest.raises(PlanError, match="batch of 1 into 2 parts") as caught:
        dp(Plan(layers(batch=1), 2), 2)
    assert caught.value.remedy == "leave out dp, or give a larger example batch"


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * nn.functional.pdist(x)[0]


@pytest.mark.parametrize("recipe", [dp, tp, coshard])
def test_operator_without_rule_is_named(recipe) -> None:
    with pytest.raises(PlanError, match="pdist has no rule") as caught:
        recipe(Plan(capture(Odd(), torch.zeros(4, 6)), 2), 2)
    assert "test_recipes.py" in caught.value.place and "pdist(x)" in caught.value.place
    assert "plain operators" in caught.value.remedy


@pytest.mark.parametrize("recipe", [tp, coshard])
def test_nothing_to_cut(recipe) -> None:
    with pytest.raises(PlanError, match=r"=9: Layers has no inner dim .* 9 parts"):
        recipe(Plan(layers(), 9), 9)
    with pytest.raises(PlanError, match="is no number of parts"):
        recipe(Plan(layers(), 1), -1)


def test_recipes_compose() -> None:
    plan = coshard(tp(dp(Plan(gpt_graph(), 4), 2), 2), 2)
    decision = plan.decisions["transformer.h.0.mlp.c_fc/linear"]
    assert [(one.axis, one.size) for one in decision.uses] == [("dp", 2), ("tp", 2), ("co", 2)]
    assert decision.devices == (0, 0, 1, 1, 2, 2, 3, 3) and decision.recompute is not None
    plain = plan.decisions["transformer.h.0/add"]
    assert [one.axis for one in plain.uses] == ["dp"] and plain.devices is None


def test_coshard_chains() -> None:
    plan = coshard(Plan(gpt_graph(), 1), 4)
    found = cuts(plan, "co")
    assert found["transformer.h.0.attn.c_attn/linear"] == "n"
    # the vocabulary is cut by algorithms whose parts talk: they cannot run one after the other
    assert "lm_head/linear" not in found and "cross_entropy_loss" not in found
    marks = {op: decision.recompute for op, decision in plan.decisions.items()}
    assert set(marks) == set(found)
    blocks = {(op.split("/")[0].split(".")[2], "mlp" in op): mark for op, mark in marks.items()}
    assert len(set(blocks.values())) == 4 and None not in blocks.values()
    assert all(decision.devices == (0, 0, 0, 0) for decision in plan.decisions.values())


def test_coshard_fills_in_axes_that_an_op_lacks() -> None:
    """Ops that tp left alone run on every device; so must their chunks."""
    graph = layers(width=32, num_layers=2)
    told = Plan(graph, 2).trans("layers.0", copy(2, "tp"))
    plan = coshard(told, 2)
    decision = plan.decisions["layers.0.fc/linear"]
    assert decision.uses[0].use == Copied() and decision.devices == (0, 0, 1, 1)
    alone = coshard(Plan(graph, 2), 2)
    assert [one.axis for one in alone.decisions["layers.0.fc/linear"].uses] == ["all", "co"]
    with pytest.raises(PlanError, match=r"tp=2 = 2 parts, but there are 3"):
        coshard(Plan(graph, 3).trans("layers.0", copy(2, "tp")), 2)


def test_coshard_needs_room_inside_earlier_cuts() -> None:
    graph = mlp_graph()
    plan = coshard(tp(Plan(graph, 2), 2), 4)
    assert plan.decisions["up/linear"].sizes == (2, 4)
    with pytest.raises(PlanError, match="coshard=8"):
        coshard(tp(Plan(graph, 2), 2), 8)


def test_recompute_each_module_as_one() -> None:
    graph = gpt_graph()
    plan = recompute(Plan(graph, 1), "transformer.h.*")
    marks = {op: decision.recompute for op, decision in plan.decisions.items()}
    assert {op for op in marks if op.startswith("transformer.h.1")} == {op for op, mark in marks.items() if mark == 1}
    assert set(marks.values()) == {0, 1} and "lm_head/linear" not in marks
    assert [str(line) for line in plan.lines] == [f"trans transformer.h.{i}.**: recompute" for i in range(2)]
    both = recompute(coshard(Plan(graph, 1), 2), "transformer.h.*")
    assert (
        both.decisions["transformer.h.0.mlp.c_fc/linear"].recompute
        == coshard(Plan(graph, 1), 2).decisions["transformer.h.0.mlp.c_fc/linear"].recompute
    )
    picked = recompute(Plan(graph, 1), "** op=gelu")
    assert {decision.recompute for decision in picked.decisions.values()} == {0}
    with pytest.raises(PlanError, match="matches no op"):
        recompute(Plan(graph, 1), "transformer.layers.*")


def test_recompute_every_layer() -> None:
    graph = gpt_graph()
    assert recompute(Plan(graph, 1)).lines == recompute(Plan(graph, 1), "transformer.h.*").lines
    flat = recompute(Plan(mlp_graph(), 1))
    assert flat.lines == recompute(recompute(Plan(mlp_graph(), 1), "up"), "down").lines
    with pytest.raises(PlanError, match="has no modules") as caught:
        recompute(Plan(capture(Odd(), torch.zeros(4, 6)), 1))
    assert "recompute=PATTERN" in caught.value.remedy


class Powers(nn.Module):
    """The only dim of its weight is a dim of the input too."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w @ self.w).square().mean()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.down(self.up(x).relu() * gate).square().mean()


@pytest.mark.parametrize("recipe", ["tp=2", "dp=2,tp=2"])
def test_what_a_weight_shares_with_an_input_is_cut_if_there_is_nothing_else(recipe: str) -> None:
    x = torch.randn(4, 8)
    assert weft.verify(Powers(), x, plan=recipe)
    assert weft.verify(Gated(), (x, torch.randn(4, 16)), plan=recipe)


def test_what_blocks_a_cut_is_named() -> None:
    with pytest.raises(
        PlanError, match=r"linear, k \(8\) is less than 9; .* b0 \(9\) is a dim of the input input"
    ) as caught:
        tp(Plan(capture(nn.Sequential(nn.Linear(8, 8)), torch.zeros(9, 8)), 9), 9)
    assert caught.value.place


class Strided(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.as_strided((4, 8), (8, 1))).square().mean()


def test_what_reads_the_batch_whole_is_named() -> None:
    with pytest.raises(PlanError, match="as_strided cannot be cut along dim 0 of input x") as caught:
        dp(Plan(capture(Strided(8, 8), torch.zeros(4, 8)), 2), 2)
    assert "x.as_strided(" in caught.value.place and "keep rows apart" in caught.value.remedy


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.wide, self.head = nn.EmbeddingBag(10, 8), nn.Linear(3, 8), nn.Linear(16, 8)

    def forward(self, ids: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.bags(ids, offsets), self.wide(x)], 1)).square().mean()


def test_a_batch_of_bags_is_cut() -> None:
    example = torch.randint(10, (12,)), torch.tensor([0, 3, 5, 9]), torch.randn(4, 3)
    plan = dp(Plan(capture(Bags(), example), 2), 2)
    assert all(any(isinstance(one.use, Cut) for one in plan.decision(op).uses) for op in plan.graph.ops)
    assert weft.verify(Bags(), example, plan="dp=2")


def test_recompute_each_call_of_a_module() -> None:
    plan = recompute(Plan(odd_graph(), 1), "act")
    assert plan.decisions["act/relu"].recompute != plan.decisions["act@1/relu"].recompute


def test_weights_of_cuts() -> None:
    graph = layers()  # 4 x 8 values of 8 bytes, products of 8 x 8
    rules = RuleBook(graph)
    linear, relu = "layers.1.fc/linear", "layers.1/relu"
    assert multiplications(rules.rule(graph.by_name[linear])) == 2 * 4 * 8 * 8
    assert multiplications(rules.rule(graph.by_name[relu])) == 0
    tensor = 4 * 8 * 8
    # by columns: the gradient of the input is summed, the result gathered
    assert weigh(graph, rules, {linear: "n"}).bytes == 2 * tensor + tensor
    # by rows: the input is sliced, its gradient gathered, the result summed
    assert weigh(graph, rules, {linear: "k"}).bytes == tensor + 2 * tensor
    # by the batch: the weight's gradient is summed, the input's and the result gathered
    assert weigh(graph, rules, {linear: "b0"}).bytes == 2 * 8 * 8 * 8 + tensor + tensor
    pair = weigh(graph, rules, {"layers.0.fc/linear": "n", "layers.0/relu": "d1", linear: "k"})
    assert pair.bytes == 2 * tensor and pair.flops == 2 * 512  # no gradient flows into the input


class Patches(nn.Module):
    """Patches of an image, then a stream of channels with norms between blocks, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.first, self.norm = nn.Parameter(torch.zeros(1, 1, 16)), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.down(self.up(self.norm(x)).relu())
        return x.square().mean()


def test_what_begins_a_stream_is_gathered_before_it() -> None:
    plan = tp(Plan(capture(Patches(), torch.zeros(4, 3, 16, 16)), 2), 2)
    assert cuts(plan, "tp") == {
        "patches/conv2d": "o",
        "flatten": "d1",
        "transpose": "d2",
        "cat": "copy",
        "up/linear": "n",
        "relu": "d2",
        "down/linear": "k",
    }


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.norm, self.mix = nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(self.reduce(x)).relu()).square().mean()


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_channels_between_convolutions_are_cut(parts: int) -> None:
    found = cuts(tp(Plan(capture(Convolutions(), torch.zeros(4, 4, 8, 8)), parts), parts), "tp")
    assert (found["reduce/conv2d"], found["norm/batch_norm"], found["relu"], found["mix/conv2d"]) == (
        "o",
        "c",
        "d1",
        "i",
    )


class Heads(nn.Module):
    """Attention as torch.nn has it: query, key and value fused as `(3 h d)`, heads laid inside the batch as `(b h)`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y.square().mean()


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_heads_inside_other_dims_are_found(parts: int) -> None:
    plan = tp(Plan(capture(Heads(), torch.zeros(4, 8, 16)), parts), parts)
    found = cuts(plan, "tp")
    assert found["attention/scaled_dot_product_attention"] == "h"
    assert found["attention/linear"] == "n"
    use = plan.decision("attention/linear").uses[0].use
    assert isinstance(use, Cut) and (use.groups, use.units) == ((16, 16, 16), 4)

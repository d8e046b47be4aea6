"""Every promised model under every recipe and product: equal to one device, on two, three and four of them.

A sample runs always, the whole matrix where `full` tests do. What a recipe moves is counted too: a plan that is equal
but talks too much is no Megatron.
"""

from __future__ import annotations

import itertools

import pytest

from tests.acceptance.subjects import prepared
from tests.acceptance.test_models import equal_to_one_device
from weft.cost.links import default_links
from weft.lower import lower
from weft.lower.collectives import collectives
from weft.plan.load import load_plan

MODELS = ("gpt-tied", "gpt2", "llama", "qwen3", "bert", "vit")
RECIPES = (
    *("dp=2", "dp=3", "dp=4", "tp=2", "tp=3", "tp=4", "megatron=2", "megatron=3", "megatron=4"),
    *("tp=2,sp", "tp=3,sp", "tp=4,sp", "megatron=2,sp", "megatron=3,sp", "megatron=4,sp"),
    *("coshard=2", "dp=2,coshard=2", "tp=2,coshard=2", "dp=3,coshard=2"),
    *("dp=2,zero=3", "dp=3,zero=3", "dp=4,zero=3", "tp=2,recompute", "dp=3,recompute"),
    *("dp=2,tp=2", "dp=2,megatron=2", "dp=2,tp=2,sp", "dp=2,megatron=2,sp", "dp=2,tp=2,zero=3"),
    *("dp=2,tp=2,sp,recompute", "dp=2,megatron=2,sp,zero=3,recompute", "dp=2,tp=2,sp,zero=3,coshard=2"),
)
SAMPLE = (
    ("gpt-tied", "megatron=3,sp"),
    ("gpt-tied", "dp=2,tp=2,sp,recompute"),
    ("gpt2", "megatron=4"),
    ("gpt2", "dp=3,zero=3"),
    ("llama", "megatron=3"),
    ("llama", "dp=2,megatron=2,sp"),
    ("qwen3", "megatron=4,sp"),
    ("qwen3", "dp=2,tp=2,zero=3"),
    ("bert", "tp=3,sp"),
    ("bert", "dp=2,megatron=2,sp,zero=3,recompute"),
    ("vit", "tp=4,sp"),
    ("vit", "dp=2,tp=2,sp,zero=3,coshard=2"),
)


@pytest.mark.parametrize(("name", "recipe"), SAMPLE)
def test_sample(name: str, recipe: str) -> None:
    equal_to_one_device(name, load_plan(recipe, prepared(name)[1]))


@pytest.mark.full
@pytest.mark.parametrize(("name", "recipe"), list(itertools.product(MODELS, RECIPES)))
def test_matrix(name: str, recipe: str) -> None:
    equal_to_one_device(name, load_plan(recipe, prepared(name)[1]))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])
def test_megatron_sums_twice_a_layer(name: str) -> None:
    """Two sums a layer each way, one more after the embedding, one before the head in backward."""
    program = lower(load_plan("megatron=2", prepared(name)[1]))
    counts = collectives(program).counts
    assert counts["forward"] == {"all_reduce": 2 * 2 + 1}
    assert counts["backward"] == {"all_reduce": 2 * 2 + 1}
    # norms of single heads see the part of a device only: their weights' gradients are addends
    assert counts.get("gradients", {}) == ({"all_reduce": 4} if name == "qwen3" else {})


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])
def test_sequence_parallelism_has_no_all_reduce_between_blocks(name: str) -> None:
    # with fewer key heads than parts their projections are cut along the sequence too, and exchanged after it
    parts = 2 if name in ("llama", "qwen3") else 4
    program = lower(load_plan(f"megatron={parts},sp", prepared(name)[1]), links=default_links("nccl"))
    counts = collectives(program).counts
    assert counts["forward"] == counts["backward"] == {"all_gather": 5, "reduce_scatter": 5}


def test_stored_parts_are_gathered_and_their_gradients_scattered() -> None:
    program = lower(load_plan("dp=4,zero=3", prepared("gpt-tied")[1]), links=default_links("nccl"))
    counts = collectives(program).counts
    trained = [one for one in program.graph.parameters if one.trainable]
    # every replica looks up all positions: there is nothing to sum for that table
    assert counts["gradients"] == {"reduce_scatter": len(trained) - 1}
    assert counts["forward"]["all_gather"] == len(trained)

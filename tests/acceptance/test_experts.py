"""Experts, state spaces and graphs: model files and other families of transformers, unmodified, against one device."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from weft.capture import capture
from weft.codegen import generate
from weft.compile.model_file import Subject, load_model_file
from weft.errors import CaptureError
from weft.ir.graph import Graph
from weft.lower import lower
from weft.lower.check import check
from weft.plan.divided import divided
from weft.plan.load import load_plan
from weft.plan.plan import Plan
from weft.plan.primitives import CutBy, cut
from weft.verify.compare import Sample, compare
from weft.verify.generated import run_generated
from weft.verify.reference import run_reference

MODELS = Path(__file__).parents[2] / "examples" / "models"
SHARES = {"mixtral": 0.9, "deepseek_v3": 0.9, "state_space": 0.95, "graph": 0.95}
"""Model files, and the share of the floating-point work that `tp=2` must divide at least."""
PLANS = ("dp=2", "tp=2", "tp=3", "dp=2,tp=2", "coshard=2")
ALWAYS = {("mixtral", "tp=2"), ("deepseek_v3", "dp=2"), ("state_space", "tp=3"), ("graph", "dp=2,tp=2")}
ROWS, LENGTH, VOCABULARY = 4, 12, 96

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True}
LATENT = {
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
LINEAR = {
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2Moe": {"num_experts": 6, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 48, **ROUTED},
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 36, "head_dim": 8, "attention_dropout": 0.1, **ROUTED},
    "GptOss": {"num_local_experts": 6, "head_dim": 8, "sliding_window": 4, "attention_dropout": 0.1, **ROUTED},
    "Olmoe": {"num_experts": 6, "attention_dropout": 0.1, **ROUTED},
    "GraniteMoe": {"num_local_experts": 6, **ROUTED},
    "Phimoe": {"num_local_experts": 6, **ROUTED},
    "DeepseekV2": {"n_routed_experts": 6, "moe_intermediate_size": 36, "num_experts_per_tok": 2, **LATENT},
    "Glm4Moe": {"n_routed_experts": 6, "moe_intermediate_size": 36, "num_experts_per_tok": 2, "head_dim": 8},
    "Jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, **ROUTED},
    "Mamba": {"state_size": 4, "time_step_rank": 4},
    "Mamba2": {"num_heads": 12, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4},
    "Qwen3Next": {"num_experts": 6, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 48, **LINEAR},
    "Bamba": {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4},
}
"""Other families, by the names of their classes in transformers."""

Ready = tuple[Subject, Graph, Sample]


def ready(subject: Subject) -> Ready:
    subject.model.train()
    return subject, capture(subject.model, subject.example), run_reference(subject, seed=7, wide=True)


@cache
def of_file(name: str) -> Ready:
    return ready(load_model_file(MODELS / f"{name}.py"))


@cache
def of_family(name: str) -> Ready:
    torch.manual_seed(0)
    return ready(subject_of(language_model(name, {**SMALL, **FAMILIES[name]})))


def language_model(name: str, settings: dict[str, Any]) -> nn.Module:
    config = getattr(hf, f"{name}Config")(**settings)
    made: nn.Module = getattr(hf, f"{name}ForCausalLM")(config)
    return made


def subject_of(model: nn.Module) -> Subject:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    return Subject(model, {"input_ids": ids, "labels": ids})


def equal_to_one_device(found: Ready, how: str | Plan) -> None:
    subject, graph, reference = found
    program = lower(load_plan(how, graph) if isinstance(how, str) else how)
    check(program)
    ours = run_generated(generate(program), program.graph, subject, seed=7, wide=True, reference=reference)
    assert not ours.disagreements
    worst = max(compare(ours, reference), key=lambda one: one.value)
    assert worst.value < 1e-9, worst


def table() -> list[Any]:
    pairs = list(itertools.product(SHARES, PLANS))
    return [pytest.param(*pair, marks=() if pair in ALWAYS else pytest.mark.full) for pair in pairs]


@pytest.mark.parametrize(("name", "recipe"), table())
def test_model_file(name: str, recipe: str) -> None:
    equal_to_one_device(of_file(name), recipe)


@pytest.mark.parametrize("name", SHARES)
def test_most_of_the_work_is_divided(name: str) -> None:
    found = divided(load_plan("tp=2", of_file(name)[1]))
    assert found.flops_share >= SHARES[name], found.folded[:5]


@pytest.mark.parametrize(
    "cuts",
    [
        [cut("g", [2, 1], axis="x")],
        pytest.param([cut("m", [1, 3], axis="x")], marks=pytest.mark.full),
        pytest.param([cut("g", 2, axis="x"), cut("n", 2, axis="y")], marks=pytest.mark.full),
        pytest.param([cut("g", 2, axis="x"), cut("m", 2, axis="y")], marks=pytest.mark.full),
    ],
    ids=["experts", "rows", "experts and widths", "experts and rows"],
)
def test_experts_cut_by_hand(cuts: list[CutBy]) -> None:
    ready = of_file("mixtral")
    devices = 2 * len(cuts)
    products = [op for op in ready[1].ops if "grouped_mm" in op.kind]
    assert len(products) == 4
    plan = Plan(ready[1], devices)
    for op in products:
        plan = plan.trans(op, *cuts)
    equal_to_one_device(ready, plan)


@pytest.mark.full
@pytest.mark.parametrize(("name", "recipe"), list(itertools.product(FAMILIES, ("tp=2", "dp=2"))))
def test_family(name: str, recipe: str) -> None:
    equal_to_one_device(of_family(name), recipe)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["grouped_mm", "batched_mm"])
def test_ways_to_run_experts(kind: str, dtype: torch.dtype) -> None:
    """Lower floats reach torch's own grouped product, float32 the one of transformers."""
    model = load_model_file(MODELS / "mixtral.py").model
    assert isinstance(model, hf.MixtralForCausalLM)
    model.set_experts_implementation(kind)
    equal_to_one_device(ready(subject_of(model.to(dtype))), "tp=2")


def test_a_loop_over_the_experts_that_are_used_is_refused() -> None:
    model = load_model_file(MODELS / "mixtral.py").model
    assert isinstance(model, hf.MixtralForCausalLM)
    model.set_experts_implementation("eager")
    with pytest.raises(CaptureError, match="as often as the values in a tensor say") as caught:
        capture(model, subject_of(model).example)
    assert "for expert_idx in expert_hit" in caught.value.place
    assert 'set_experts_implementation("grouped_mm")' in caught.value.remedy

"""Whole models: a captured Graph gives the eager module's loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.capture.compare import assert_same
from tests.models import GPT, MLP, GPTConfig, gpt_example
from weft.capture import capture

IDS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}


def doubles(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return module.double()


@pytest.mark.smoke
def test_mlp() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    graph = assert_same(doubles(MLP(dropout=0.2)), (x, x + 1))
    assert [op.name for op in graph.ops] == ["up/linear", "gelu", "down/linear", "drop/dropout", "mse_loss"]
    assert [item.tensor for item in graph.inputs] == ["x", "y"]
    assert graph.loss == "mse_loss"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("flash", [True, False])
def test_gpt(tied: bool, flash: bool) -> None:
    config = GPTConfig(tied=tied, flash=flash)
    graph = assert_same(doubles(GPT(config)), gpt_example(config))
    names = {parameter.names for parameter in graph.parameters}
    assert (("transformer.wte.weight", "lm_head.weight") in names) == tied
    assert "transformer.h.1.attn.c_attn/linear" in graph.by_name


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_transformers(family: str, attention: str) -> None:
    graph = assert_same(doubles(build(family, attention)), {"input_ids": IDS, "labels": LABELS}, tolerance=1e-6)
    assert {item.tensor for item in graph.inputs} == {"input_ids", "labels"}
    assert any("modeling_" in op.source.file for op in graph.ops)
    assert graph.consumers["input_ids"] and graph.consumers["labels"]


def build(family: str, attention: str, layers: int = 1) -> nn.Module:
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=64, n_positions=16, n_embd=16, n_layer=layers, n_head=4, attn_implementation=attention
            )
        )
    if family == "llama":
        config: Any = transformers.LlamaConfig(
            **SMALL, num_key_value_heads=2, max_position_embeddings=16, attn_implementation=attention
        )
        return transformers.LlamaForCausalLM(config)
    config = transformers.BertConfig(**SMALL, max_position_embeddings=16, attn_implementation=attention)
    return transformers.BertForMaskedLM(config)


def test_t5() -> None:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    assert_same(doubles(transformers.T5ForConditionalGeneration(config)), {"input_ids": IDS, "labels": LABELS})


def test_one_tensor_given_twice_stays_two_inputs() -> None:
    graph = capture(build("gpt2", "sdpa"), {"input_ids": IDS, "labels": IDS})
    assert graph.consumers["input_ids"] and graph.consumers["labels"]
    assert not any(op.kind == "cat" for op in graph.ops), "the empty cache is not joined"


@pytest.mark.parametrize("reentrant", [True, False])
def test_transformers_gradient_checkpointing(reentrant: bool) -> None:
    module = build("gpt2", "sdpa", layers=2)
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    graph = capture(module, {"input_ids": IDS, "labels": LABELS})
    assert {op.recompute for op in graph.ops if op.path.startswith("transformer.h.0")} == {1}
    assert {op.recompute for op in graph.ops if op.path.startswith("transformer.h.1")} == {2}
    assert {op.recompute for op in graph.ops if not op.path.startswith("transformer.h.")} == {None}


def test_layer_drop_of_zero() -> None:
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=24, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=16,
        max_position_embeddings=16, dropout=0.0,
    )  # fmt: skip
    graph = assert_same(
        doubles(transformers.OPTForCausalLM(config)), {"input_ids": IDS, "labels": LABELS}, tolerance=1e-6
    )
    assert not any(op.kind in ("rand", "dropout") for op in graph.ops)

"""Transformers' Llama for `bench/predict.py`."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

WORDS, LENGTH, ROWS = 4096, 128, 8


def model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def example() -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}

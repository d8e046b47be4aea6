"""A model file: the Llama of transformers with 32 small layers."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 32


def model() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=2,
            use_cache=False,
        )
    ).train()


def example() -> dict[str, Tensor]:
    words = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": words, "labels": words}

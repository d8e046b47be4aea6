"""Qwen3 as transformers has it: queries and keys are normalised head by head, the head is tied to the embedding.

The norm over one head keeps the heads apart, so they may be cut; heads are wider than the model's width divided by
their number. Some labels are left out (-100), so each device's share of the loss has a weight of its own.

    weft verify examples/models/qwen3.py --plan coshard=2
"""

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

WORDS, LENGTH, ROWS = 97, 16, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=WORDS,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=16,
            attention_dropout=0.1,
            tie_word_embeddings=True,
            use_cache=False,
        )
    ).train()


def example() -> dict[str, Tensor]:
    words = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = words.clone()
    labels[0, :5] = -100
    return {"input_ids": words, "labels": labels}

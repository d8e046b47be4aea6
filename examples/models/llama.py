"""Llama as transformers has it: rotary positions, root-mean-square norms, a gated MLP, dropout in attention.

Six heads of queries share three of keys and values: a cut in two gives one device two of the three, and the queries
that go with them.

    weft verify examples/models/llama.py --plan dp=2,tp=2
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

WORDS, LENGTH, ROWS = 97, 16, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            attention_dropout=0.1,
            use_cache=False,
        )
    ).train()


def example() -> dict[str, Tensor]:
    words = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": words, "labels": words}

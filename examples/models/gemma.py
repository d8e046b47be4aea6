"""Gemma 2 as transformers has it: every other layer sees a window of the last words only, scores and logits are capped.

A cap is a tanh, which acts on complete values only: a sum must be whole before it. The head is tied to the embedding,
which is scaled on its way in.

    weft verify examples/models/gemma.py --plan tp=2
"""

import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM

WORDS, LENGTH, ROWS = 97, 16, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=WORDS,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=6,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            attention_dropout=0.1,
            attn_implementation="eager",  # the one that caps scores
            use_cache=False,
        )
    ).train()


def example() -> dict[str, Tensor]:
    words = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": words, "labels": words}

"""A Hugging Face model with `gradient_checkpointing_enable()`: what is inside a block is computed again in backward.

Weft sees the regions that the model marks and recomputes the same ones, with any plan.

    weft verify examples/checkpointed.py --plan "dp=2,tp=2,megatron"
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

WORDS, LENGTH, ROWS = 48, 12, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=WORDS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    config.use_cache = False
    made = GPT2LMHeadModel(config)
    made.gradient_checkpointing_enable()
    return made


def example() -> dict[str, Tensor]:
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}

"""BERT as transformers has it, learning to fill in masked words: only those count in the loss.

Rows have different numbers of masked words, so a mean over the batch is not the mean of its parts' means. Some words at
the end are padding, which attention must not see.

    weft verify examples/models/bert.py --plan dp=2
"""

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

WORDS, MASK, LENGTH, ROWS = 97, 96, 16, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        )
    ).train()


def example() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(1)
    words = torch.randint(0, MASK, (ROWS, LENGTH), generator=draws)
    masked = torch.rand(ROWS, LENGTH, generator=draws) < 0.3
    seen = torch.ones(ROWS, LENGTH, dtype=torch.long)
    seen[1, 12:] = 0
    return {
        "input_ids": words.masked_fill(masked, MASK),
        "attention_mask": seen,
        "labels": words.masked_fill(~masked, -100),
    }

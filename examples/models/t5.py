"""T5 as transformers has it: an encoder, a decoder that reads it, and one matrix in three places.

The embedding of the encoder, that of the decoder and the head are the same parameter: its gradient has three addends.
Attention adds a learned bias for each head by the distance of two words; the first layer's is used by all.

    weft verify examples/models/t5.py --plan dp=2,tp=2
"""

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

WORDS, READ, WRITTEN, ROWS = 97, 14, 10, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS,
            d_model=48,
            d_kv=8,
            d_ff=96,
            num_layers=2,
            num_heads=6,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            dropout_rate=0.1,
            tie_word_embeddings=True,
            decoder_start_token_id=0,
            use_cache=False,
        )
    ).train()


def example() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(1)
    read = torch.randint(1, WORDS, (ROWS, READ), generator=draws)
    written = torch.randint(1, WORDS, (ROWS, WRITTEN), generator=draws)
    written[0, 7:] = -100
    return {"input_ids": read, "attention_mask": (read > 9).long(), "labels": written}

"""GPT-2 as transformers has it: dropout everywhere, learned positions, a head tied to the embedding.

Queries, keys and values come from one matrix three times as wide (`c_attn`): cutting heads means three ranges of its
columns for each device. 6 heads can be shared by 2 and by 3.

    weft verify examples/models/gpt.py --plan tp=3
"""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

WORDS, LENGTH, ROWS = 97, 16, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=48,
            n_layer=2,
            n_head=6,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).train()


def example() -> dict[str, Tensor]:
    words = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": words, "labels": words}

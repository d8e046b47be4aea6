"""A model file: Mixtral of transformers, unmodified: grouped-query attention, and a mixture of experts in every layer.

Each token takes two of six experts. Tokens are sorted by expert and multiplied in groups (`grouped_mm`), whose sizes
are known only in the run; the router's balance enters the loss. Worth cutting: heads, experts or their hidden dim,
vocabulary.
"""

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

VOCABULARY, LENGTH = 96, 12


def model() -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=6,
        num_local_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        attention_dropout=0.1,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def example() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (4, LENGTH))
    return {"input_ids": tokens, "labels": tokens}

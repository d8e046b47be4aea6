"""A model file: DeepSeek-V3 of transformers, unmodified: latent attention, shared experts, routing by groups of them.

Queries, keys and values pass through narrow latents; the first layer is dense, the others have experts that share one
that all tokens take; a token chooses two groups of experts, then its experts in them. Worth cutting: heads after the
latents, experts or their hidden dim, vocabulary.
"""

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

VOCABULARY, LENGTH = 96, 12


def model() -> nn.Module:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        moe_intermediate_size=36,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        n_shared_experts=1,
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=18,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=12,
        max_position_embeddings=LENGTH,
        attention_dropout=0.1,
        use_cache=False,
    )
    return DeepseekV3ForCausalLM(config)


def example() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (4, LENGTH))
    return {"input_ids": tokens, "labels": tokens}

"""Text models of transformers beyond those of `examples/models`: tiny, random, dropout on, straight from their classes.

A row is the name of an architecture and the settings in which it differs from the usual ones of its kind. The settings
of a kind that a configuration class does not know are ignored by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from weft.compile.model_file import Subject

VOCABULARY, LENGTH, WRITTEN, ROWS = 64, 12, 8, 4
Settings = Mapping[str, Any]

WORDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
USUAL = {
    **WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
}
GROUPED = {**USUAL, "num_key_value_heads": 2, "head_dim": 8, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
SLIDING = {**GROUPED, "sliding_window": 6}
OLD = {**WORDS, "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 40, "n_ctx": 40, "dff": 48}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "head_dim": 4,
}
STATES = {**WORDS, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
MASKED = {**USUAL, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "embedding_size": 32}
BART = {
    **WORDS,
    "d_model": 32,
    "max_position_embeddings": 40,
    "decoder_start_token_id": 1,
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 48))},
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
}
T5 = {
    **WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.1,
    "decoder_start_token_id": 0,
    "local_radius": 3,
    "global_block_size": 4,
}

CAUSAL: dict[str, tuple[Settings, Settings]] = {
    "GPTNeoForCausalLM": (
        {**USUAL, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 6},
        {"resid_dropout": 0.1, "embed_dropout": 0.1},
    ),
    "GPTJForCausalLM": (OLD, {"rotary_dim": 4, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}),
    "CodeGenForCausalLM": (OLD, {"rotary_dim": 4, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}),
    "GPTNeoXForCausalLM": (USUAL, {}),
    "GPTBigCodeForCausalLM": (OLD, {}),
    "OpenAIGPTLMHeadModel": (OLD, {}),
    "CTRLLMHeadModel": (OLD, {}),
    "OPTForCausalLM": (USUAL, {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1}),
    "BloomForCausalLM": (USUAL, {"n_layer": 2, "n_head": 4}),
    "FalconForCausalLM": (USUAL, {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "MptForCausalLM": (WORDS, {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 40, "expansion_ratio": 2}),
    "XGLMForCausalLM": (USUAL, {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}),
    "BioGptForCausalLM": (MASKED, {}),
    "PhiForCausalLM": (GROUPED, {}),
    "Phi3ForCausalLM": (GROUPED, {}),
    "MistralForCausalLM": (SLIDING, {}),
    "MinistralForCausalLM": (SLIDING, {}),
    "Qwen2ForCausalLM": (GROUPED, {}),
    "GemmaForCausalLM": (GROUPED, {}),
    "Gemma3ForCausalLM": (SLIDING, {}),
    "VaultGemmaForCausalLM": (SLIDING, {}),
    "OlmoForCausalLM": (GROUPED, {}),
    "Olmo2ForCausalLM": (GROUPED, {}),
    "Olmo3ForCausalLM": (SLIDING, {}),
    "StableLmForCausalLM": (GROUPED, {}),
    "Starcoder2ForCausalLM": (GROUPED, {"residual_dropout": 0.1, "embedding_dropout": 0.1}),
    "CohereForCausalLM": (GROUPED, {}),
    "Cohere2ForCausalLM": (SLIDING, {}),
    "SmolLM3ForCausalLM": (GROUPED, {}),
    "GraniteForCausalLM": (GROUPED, {}),
    "GlmForCausalLM": (GROUPED, {}),
    "Glm4ForCausalLM": (GROUPED, {}),
    "HeliumForCausalLM": (GROUPED, {}),
    "NemotronForCausalLM": (GROUPED, {}),
    "PersimmonForCausalLM": (GROUPED, {}),
    "SeedOssForCausalLM": (GROUPED, {}),
    "Ernie4_5ForCausalLM": (GROUPED, {}),
    "Exaone4ForCausalLM": (SLIDING, {}),
    "ArceeForCausalLM": (GROUPED, {}),
    "ApertusForCausalLM": (GROUPED, {}),
    "BitNetForCausalLM": (GROUPED, {}),
    "DiffLlamaForCausalLM": (GROUPED, {"attention_dropout": 0.0}),
    "Lfm2ForCausalLM": (GROUPED, {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]}),
    "YoutuForCausalLM": (GROUPED, {**LATENT, "v_head_dim": 8}),
    "DogeForCausalLM": (GROUPED, {}),
    "MambaForCausalLM": (STATES, {"time_step_rank": 4}),
    "Mamba2ForCausalLM": (STATES, {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}),
    "RwkvForCausalLM": (STATES, {"attention_hidden_size": 32, "intermediate_size": 48, "context_length": 32}),
}
MASKING: dict[str, tuple[Settings, Settings]] = {
    "RobertaForMaskedLM": (MASKED, {}),
    "XLMRobertaForMaskedLM": (MASKED, {}),
    "CamembertForMaskedLM": (MASKED, {}),
    "ElectraForMaskedLM": (MASKED, {"embedding_size": 16}),
    "DistilBertForMaskedLM": (MASKED, {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "dropout": 0.1}),
    "AlbertForMaskedLM": (MASKED, {"embedding_size": 16}),
    "DebertaForMaskedLM": (MASKED, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "DebertaV2ForMaskedLM": (
        MASKED,
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True},
    ),
    "MPNetForMaskedLM": (MASKED, {}),
    "RoFormerForMaskedLM": (MASKED, {}),
    "SqueezeBertForMaskedLM": (MASKED, {}),
    "ConvBertForMaskedLM": (MASKED, {"head_ratio": 2, "conv_kernel_size": 3}),
    "ModernBertForMaskedLM": (MASKED, {"local_attention": 6, "global_attn_every_n_layers": 2, "mlp_dropout": 0.1}),
    "FNetForMaskedLM": (MASKED, {}),
    "EsmForMaskedLM": (MASKED, {"mask_token_id": 3}),
    "FunnelForMaskedLM": (WORDS, {"block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48}),
    "XLMWithLMHeadModel": (WORDS, {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 40}),
    "XLNetLMHeadModel": (WORDS, {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "use_mems_train": False}),
}
TWO_SIDED: dict[str, tuple[Settings, Settings]] = {
    "BartForConditionalGeneration": (BART, {}),
    "MBartForConditionalGeneration": (BART, {}),
    "PegasusForConditionalGeneration": (BART, {}),
    "PegasusXForConditionalGeneration": (BART, {"block_size": 4, "num_global_tokens": 2}),
    "MarianMTModel": (BART, {}),
    "BlenderbotForConditionalGeneration": (BART, {}),
    "PLBartForConditionalGeneration": (BART, {}),
    "M2M100ForConditionalGeneration": (BART, {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
    "ProphetNetForConditionalGeneration": (
        {**WORDS, "hidden_size": 32, "ngram": 2, "num_buckets": 8, "relative_max_distance": 16},
        {
            **{f"num_{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")},
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 40,
            "decoder_start_token_id": 1,
        },
    ),
    "WhisperForConditionalGeneration": (BART, {"num_mel_bins": 8, "max_source_positions": 10}),
    "MT5ForConditionalGeneration": (T5, {}),
    "UMT5ForConditionalGeneration": (T5, {}),
    "LongT5ForConditionalGeneration": (T5, {"encoder_attention_type": "transient-global"}),
}
FAMILIES = {**CAUSAL, **MASKING, **TWO_SIDED}


def family(name: str, *, dropout: bool = True) -> Subject:
    """A model of that architecture, and a batch some of whose labels are left out."""
    architecture, (usual, own) = getattr(transformers, name), FAMILIES[name]
    torch.manual_seed(1)
    config = architecture.config_class(**{**usual, **own})
    if not dropout:
        for key, value in list(vars(config).items()):
            if "drop" in key and isinstance(value, float):
                setattr(config, key, 0.0)
    model: nn.Module = architecture(config)
    return Subject(model.train(), _batch(name))


def _batch(name: str) -> dict[str, Tensor]:
    words = torch.randint(4, VOCABULARY, (ROWS, LENGTH))
    labels = torch.randint(4, VOCABULARY, (ROWS, WRITTEN)) if name in TWO_SIDED else words.clone()
    labels[0, -3:], labels[1, 1] = -100, -100
    if name.startswith("Whisper"):
        return {"input_features": torch.randn(ROWS, 8, 20), "labels": labels}
    return {"input_ids": words, "labels": labels}

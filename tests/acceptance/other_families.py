"""Families of transformers for sound, video, time series, detection, and images with words, tiny, in training mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.acceptance.vision_families import CLASSES, ROWS, SIDE, SMALL, classes, images
from weft.compile.model_file import Subject

AUDIO: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 3),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 8,
    # masking is drawn by numpy, outside the model
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "ctc_loss_reduction": "mean",
}


def with_loss(model: nn.Module, batch: dict[str, torch.Tensor], output: str = "last_hidden_state") -> Subject:
    return Subject(SineOfOutput(model, output), batch)


class SineOfOutput(nn.Module):
    """A loss for models that have none. (The mean square of a layer norm would be a constant.)"""

    def __init__(self, model: nn.Module, output: str) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(self.model(**batch), self.output)
        return found.sin().mean()


class _ReturnsLoss(nn.Module):
    """CLIP and its kin give their loss when they are told to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(**batch, return_loss=True).loss
        return found


def _pair(config: type, vision: dict[str, Any], text: dict[str, Any], **more: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"attention_dropout": 0.1}
    return config(vision_config=sizes | vision, text_config=sizes | text, **more)


def _whisper(**more: Any) -> Any:
    return hf.WhisperConfig(
        vocab_size=32,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=8,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dropout=0.1,
        **more,
    )


def clip() -> Subject:
    text = {"vocab_size": 32, "max_position_embeddings": 8, "eos_token_id": 31, "bos_token_id": 1, "pad_token_id": 0}
    config = _pair(hf.CLIPConfig, {"image_size": SIDE, "patch_size": 4}, text, projection_dim=12)
    ids = torch.randint(2, 31, (ROWS, 8))
    ids[:, -1] = 31
    return Subject(_ReturnsLoss(hf.CLIPModel(config)), {"pixel_values": images(), "input_ids": ids})


def siglip() -> Subject:
    text = {"vocab_size": 32, "max_position_embeddings": 8, "projection_size": 16}
    config = _pair(hf.SiglipConfig, {"image_size": SIDE, "patch_size": 4}, text)
    ids = torch.randint(2, 31, (ROWS, 8))
    return Subject(_ReturnsLoss(hf.SiglipModel(config)), {"pixel_values": images(), "input_ids": ids})


def wav2vec2() -> Subject:
    labels = torch.randint(1, 8, (ROWS, 4))
    labels[0, 2:] = -100
    return Subject(
        hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**AUDIO)), {"input_values": torch.randn(ROWS, 160), "labels": labels}
    )


def wav2vec2_classifier() -> Subject:
    config = hf.Wav2Vec2Config(**AUDIO, num_labels=CLASSES, classifier_proj_size=12)
    return Subject(
        hf.Wav2Vec2ForSequenceClassification(config), {"input_values": torch.randn(ROWS, 160), "labels": classes()}
    )


def hubert() -> Subject:
    labels = torch.randint(1, 8, (ROWS, 4))
    return Subject(
        hf.HubertForCTC(hf.HubertConfig(**AUDIO)), {"input_values": torch.randn(ROWS, 160), "labels": labels}
    )


def wavlm() -> Subject:
    config = hf.WavLMConfig(**AUDIO, num_labels=CLASSES, classifier_proj_size=12)
    return Subject(
        hf.WavLMForSequenceClassification(config), {"input_values": torch.randn(ROWS, 160), "labels": classes()}
    )


def ast() -> Subject:
    sizes = {name: value for name, value in SMALL.items() if name != "image_size"}
    config = hf.ASTConfig(**sizes, max_length=24, num_mel_bins=16, num_labels=CLASSES)
    model = hf.ASTForAudioClassification(config)
    return Subject(model, {"input_values": torch.randn(ROWS, 24, 16), "labels": classes()})


def whisper() -> Subject:
    return Subject(
        hf.WhisperForConditionalGeneration(_whisper()),
        {"input_features": torch.randn(ROWS, 8, 16), "labels": torch.randint(3, 30, (ROWS, 6))},
    )


def whisper_classifier() -> Subject:
    config = _whisper(num_labels=CLASSES, classifier_proj_size=12)
    return Subject(
        hf.WhisperForAudioClassification(config), {"input_features": torch.randn(ROWS, 8, 16), "labels": classes()}
    )


def patchtst() -> Subject:
    config = hf.PatchTSTConfig(
        num_input_channels=3,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_attention_heads=4,
        num_hidden_layers=2,
        ffn_dim=32,
        prediction_length=4,
        attention_dropout=0.1,
        ff_dropout=0.1,
        head_dropout=0.1,
    )
    batch = {"past_values": torch.randn(ROWS, 16, 3), "future_values": torch.randn(ROWS, 4, 3)}
    return Subject(hf.PatchTSTForPrediction(config), batch)


def patchtst_pretraining() -> Subject:
    config = hf.PatchTSTConfig(
        num_input_channels=3,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_attention_heads=4,
        num_hidden_layers=2,
        ffn_dim=32,
        random_mask_ratio=0.5,
    )
    return Subject(hf.PatchTSTForPretraining(config), {"past_values": torch.randn(ROWS, 16, 3)})


def patchtsmixer() -> Subject:
    config = hf.PatchTSMixerConfig(
        num_input_channels=3, context_length=16, patch_length=4, patch_stride=4, d_model=8, prediction_length=4
    )
    batch = {"past_values": torch.randn(ROWS, 16, 3), "future_values": torch.randn(ROWS, 4, 3)}
    return Subject(hf.PatchTSMixerForPrediction(config), batch)


def time_series() -> Subject:
    config = hf.TimeSeriesTransformerConfig(
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2],
        num_time_features=2,
        encoder_layers=1,
        decoder_layers=1,
        d_model=16,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        # with more, layers are skipped by chance, and a program has no branches
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )
    batch = {
        "past_values": torch.randn(ROWS, 10),
        "past_time_features": torch.randn(ROWS, 10, 2),
        "past_observed_mask": torch.ones(ROWS, 10),
        "future_values": torch.randn(ROWS, 4),
        "future_time_features": torch.randn(ROWS, 4, 2),
    }
    return Subject(hf.TimeSeriesTransformerForPrediction(config), batch)


def llava() -> Subject:
    text = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 32,
        "attention_dropout": 0.1,
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "image_size": SIDE,
        "patch_size": 8,
    }
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=31, vision_feature_layer=-1)
    ids = torch.randint(1, 30, (ROWS, 10))
    ids[:, 1:5] = 31
    return Subject(
        hf.LlavaForConditionalGeneration(config),
        {"pixel_values": images(), "input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)},
    )


def blip() -> Subject:
    text = {"vocab_size": 32, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text |= {"encoder_hidden_size": 16, "projection_dim": 16}
    config = _pair(hf.BlipConfig, {"image_size": SIDE, "patch_size": 4}, text, projection_dim=12)
    ids = torch.randint(3, 31, (ROWS, 8))
    return Subject(
        hf.BlipForConditionalGeneration(config), {"pixel_values": images(), "input_ids": ids, "labels": ids.clone()}
    )


def vision_encoder_decoder() -> Subject:
    encoder = hf.ViTConfig(**SMALL)
    decoder = hf.GPT2Config(n_layer=1, n_head=4, n_embd=16, vocab_size=32, n_positions=8, add_cross_attention=True)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = hf.VisionEncoderDecoderModel(config=config)
    return Subject(model, {"pixel_values": images(), "labels": torch.randint(3, 30, (ROWS, 6))})


def videomae() -> Subject:
    config = hf.VideoMAEConfig(**SMALL, num_frames=4, tubelet_size=2, num_labels=CLASSES)
    model = hf.VideoMAEForVideoClassification(config)
    return Subject(model, {"pixel_values": torch.randn(ROWS, 4, 3, SIDE, SIDE), "labels": classes()})


def vivit() -> Subject:
    sizes = {name: value for name, value in SMALL.items() if name != "patch_size"}
    config = hf.VivitConfig(**sizes, num_frames=4, tubelet_size=[2, 8, 8], num_labels=CLASSES)
    model = hf.VivitForVideoClassification(config)
    return Subject(model, {"pixel_values": torch.randn(ROWS, 4, 3, SIDE, SIDE), "labels": classes()})


def timesformer() -> Subject:
    config = hf.TimesformerConfig(**SMALL, num_frames=2, num_labels=CLASSES)
    model = hf.TimesformerForVideoClassification(config)
    return Subject(model, {"pixel_values": torch.randn(ROWS, 2, 3, SIDE, SIDE), "labels": classes()})


def perceiver() -> Subject:
    config = hf.PerceiverConfig(
        num_latents=4,
        d_latents=16,
        d_model=16,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        vocab_size=32,
        max_position_embeddings=8,
        num_labels=CLASSES,
    )
    model = hf.PerceiverForSequenceClassification(config)
    return Subject(model, {"inputs": torch.randint(3, 31, (ROWS, 8)), "labels": classes()})


def yolos() -> Subject:
    config = hf.YolosConfig(**(SMALL | {"image_size": [SIDE, SIDE]}), num_detection_tokens=4)
    return with_loss(hf.YolosModel(config), {"pixel_values": images()})


def detr() -> Subject:
    config = hf.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=5,
    )
    return with_loss(hf.DetrModel(config), {"pixel_values": images(32)})


def clap() -> Subject:
    sound = {"spec_size": 32, "patch_size": 4, "patch_stride": [4, 4], "patch_embeds_hidden_size": 8, "depths": [1, 1]}
    sound |= {"num_attention_heads": [1, 2], "hidden_size": 16, "num_mel_bins": 8, "window_size": 4}
    text = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    text |= {"num_hidden_layers": 1, "max_position_embeddings": 16}
    config = hf.ClapConfig(audio_config=sound, text_config=text, projection_dim=8)
    batch = {
        "input_features": torch.randn(ROWS, 1, 128, 8),
        "input_ids": torch.randint(3, 31, (ROWS, 8)),
        "is_longer": torch.zeros(ROWS, 1, dtype=torch.bool),
    }
    return Subject(_ReturnsLoss(hf.ClapModel(config)), batch)


def paligemma() -> Subject:
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    text = vision | {"model_type": "gemma", "vocab_size": 32, "num_key_value_heads": 2, "head_dim": 4}
    config = hf.PaliGemmaConfig(
        vision_config=vision | {"image_size": SIDE, "patch_size": 8},
        text_config=text,
        image_token_index=31,
        projection_dim=16,
    )
    ids = torch.randint(3, 30, (ROWS, 10))
    ids[:, :4] = 31
    kinds = torch.cat([torch.zeros(ROWS, 6), torch.ones(ROWS, 4)], 1).long()
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids), "token_type_ids": kinds}
    return Subject(hf.PaliGemmaForConditionalGeneration(config), batch | {"pixel_values": images()})


def sam() -> Subject:
    config = hf.SamVisionConfig(
        hidden_size=16,
        output_channels=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=4,
        window_size=4,
        global_attn_indexes=[1],
        mlp_dim=32,
        num_pos_feats=4,
    )
    return with_loss(hf.SamVisionModel(config), {"pixel_values": images(32)})


def informer() -> Subject:
    config = hf.InformerConfig(
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2],
        num_time_features=2,
        encoder_layers=1,
        decoder_layers=1,
        d_model=16,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )
    return Subject(hf.InformerForPrediction(config), time_series().example)


FAMILIES: dict[str, Callable[[], Subject]] = {
    "clip": clip,
    "siglip": siglip,
    "wav2vec2": wav2vec2,
    "wav2vec2-classifier": wav2vec2_classifier,
    "hubert": hubert,
    "wavlm": wavlm,
    "ast": ast,
    "whisper": whisper,
    "whisper-classifier": whisper_classifier,
    "patchtst": patchtst,
    "patchtst-pretraining": patchtst_pretraining,
    "patchtsmixer": patchtsmixer,
    "time-series": time_series,
    "llava": llava,
    "blip": blip,
    "vision-encoder-decoder": vision_encoder_decoder,
    "videomae": videomae,
    "vivit": vivit,
    "timesformer": timesformer,
    "perceiver": perceiver,
    "yolos": yolos,
    "detr": detr,
    "clap": clap,
    "paligemma": paligemma,
    "sam": sam,
    "informer": informer,
}
"""By name."""

"""Families of transformers that see images, tiny, in training mode, with a loss: what a user would take as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from weft.compile.model_file import Subject

ROWS, SIDE, CLASSES = 4, 16, 6
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "image_size": SIDE,
    "patch_size": 4,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}


def images(side: int = SIDE) -> torch.Tensor:
    return torch.randn(ROWS, 3, side, side)


def classes() -> torch.Tensor:
    return torch.randint(0, CLASSES, (ROWS,))


def classifier(kind: str, config: Any, side: int = SIDE) -> Subject:
    model = getattr(hf, kind)(config)
    return Subject(model, {"pixel_values": images(side), "labels": classes()})


def deit() -> Subject:
    return classifier("DeiTForImageClassification", hf.DeiTConfig(**SMALL, num_labels=CLASSES))


def beit() -> Subject:
    config = hf.BeitConfig(**SMALL, num_labels=CLASSES, drop_path_rate=0.2, use_relative_position_bias=True)
    return classifier("BeitForImageClassification", config)


def dinov2() -> Subject:
    config = hf.Dinov2Config(**SMALL, num_labels=CLASSES, drop_path_rate=0.2, mlp_ratio=2)
    return classifier("Dinov2ForImageClassification", config)


def dinov2_registers() -> Subject:
    config = hf.Dinov2WithRegistersConfig(**SMALL, num_labels=CLASSES, drop_path_rate=0.2, mlp_ratio=2)
    return classifier("Dinov2WithRegistersForImageClassification", config)


def convnext() -> Subject:
    config = hf.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, patch_size=2, drop_path_rate=0.2, num_labels=CLASSES
    )
    return classifier("ConvNextForImageClassification", config)


def convnextv2() -> Subject:
    config = hf.ConvNextV2Config(
        hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, patch_size=2, drop_path_rate=0.2, num_labels=CLASSES
    )
    return classifier("ConvNextV2ForImageClassification", config)


def swinv2() -> Subject:
    config = hf.Swinv2Config(
        image_size=SIDE,
        patch_size=2,
        embed_dim=12,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=CLASSES,
        hidden_dropout_prob=0.1,
        drop_path_rate=0.2,
    )
    return classifier("Swinv2ForImageClassification", config)


def resnet() -> Subject:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], num_labels=CLASSES)
    return classifier("ResNetForImageClassification", config)


def regnet() -> Subject:
    config = hf.RegNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], groups_width=8, num_labels=CLASSES)
    return classifier("RegNetForImageClassification", config)


def mobilenetv1() -> Subject:
    config = hf.MobileNetV1Config(image_size=32, depth_multiplier=0.25, num_labels=CLASSES, classifier_dropout_prob=0.1)
    return classifier("MobileNetV1ForImageClassification", config, 32)


def mobilenetv2() -> Subject:
    config = hf.MobileNetV2Config(image_size=32, depth_multiplier=0.25, num_labels=CLASSES, classifier_dropout_prob=0.1)
    return classifier("MobileNetV2ForImageClassification", config, 32)


def mobilevit() -> Subject:
    config = hf.MobileViTConfig(
        image_size=32,
        hidden_sizes=[12, 16, 20],
        neck_hidden_sizes=[8, 8, 12, 12, 16, 16, 20],
        num_attention_heads=2,
        num_labels=CLASSES,
        attention_probs_dropout_prob=0.1,
    )
    return classifier("MobileViTForImageClassification", config, 32)


def segformer() -> Subject:
    config = hf.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
        num_labels=CLASSES,
        drop_path_rate=0.1,
    )
    model = hf.SegformerForSemanticSegmentation(config)
    return Subject(model, {"pixel_values": images(32), "labels": torch.randint(0, CLASSES, (ROWS, 32, 32))})


def levit() -> Subject:
    config = hf.LevitConfig(
        image_size=32,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 4],
        depths=[1, 1, 1],
        key_dim=[4, 4, 4],
        num_labels=CLASSES,
    )
    return classifier("LevitForImageClassification", config, 32)


def pvt() -> Subject:
    config = hf.PvtConfig(
        image_size=32,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        mlp_ratios=[2, 2, 2, 2],
        num_labels=CLASSES,
    )
    return classifier("PvtForImageClassification", config, 32)


def efficientnet() -> Subject:
    config = hf.EfficientNetConfig(
        image_size=32, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320, num_labels=CLASSES
    )
    return classifier("EfficientNetForImageClassification", config, 32)


def focalnet() -> Subject:
    config = hf.FocalNetConfig(
        image_size=SIDE,
        patch_size=2,
        embed_dim=12,
        hidden_sizes=[12, 24],
        depths=[1, 1],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
        num_labels=CLASSES,
    )
    return classifier("FocalNetForImageClassification", config)


def poolformer() -> Subject:
    config = hf.PoolFormerConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_labels=CLASSES)
    return classifier("PoolFormerForImageClassification", config, 32)


def cvt() -> Subject:
    config = hf.CvtConfig(
        embed_dim=[8, 16], num_heads=[1, 2], depth=[1, 2], patch_sizes=[7, 3], patch_stride=[4, 2], num_labels=CLASSES
    )
    for name, value in {
        "patch_padding": [2, 1],
        "mlp_ratio": [2.0, 2.0],
        "attention_drop_rate": [0.1, 0.1],
        "drop_rate": [0.1, 0.1],
        "drop_path_rate": [0.0, 0.1],
        "qkv_bias": [True, True],
        "cls_token": [False, True],
        "qkv_projection_method": ["dw_bn", "dw_bn"],
        "kernel_qkv": [3, 3],
        "padding_kv": [1, 1],
        "stride_kv": [2, 2],
        "padding_q": [1, 1],
        "stride_q": [1, 1],
    }.items():
        setattr(config, name, value)
    return classifier("CvtForImageClassification", config, 32)


def vit_mae() -> Subject:
    config = hf.ViTMAEConfig(
        **SMALL,
        decoder_num_attention_heads=4,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_intermediate_size=32,
        mask_ratio=0.5,
    )
    return Subject(hf.ViTMAEForPreTraining(config), {"pixel_values": images()})


def vit_msn() -> Subject:
    return classifier("ViTMSNForImageClassification", hf.ViTMSNConfig(**SMALL, num_labels=CLASSES))


def ijepa() -> Subject:
    return classifier("IJepaForImageClassification", hf.IJepaConfig(**SMALL, num_labels=CLASSES))


FAMILIES: dict[str, Callable[[], Subject]] = {
    "deit": deit,
    "beit": beit,
    "dinov2": dinov2,
    "dinov2-registers": dinov2_registers,
    "convnext": convnext,
    "convnextv2": convnextv2,
    "swinv2": swinv2,
    "resnet": resnet,
    "regnet": regnet,
    "mobilenetv1": mobilenetv1,
    "mobilenetv2": mobilenetv2,
    "mobilevit": mobilevit,
    "segformer": segformer,
    "levit": levit,
    "pvt": pvt,
    "efficientnet": efficientnet,
    "focalnet": focalnet,
    "poolformer": poolformer,
    "cvt": cvt,
    "vit-mae": vit_mae,
    "vit-msn": vit_msn,
    "ijepa": ijepa,
}
"""By name."""

"""A model file: Swin for image classification, straight from transformers, with dropout and drop path.

Interesting to cut: windows are made by reshapes and shifted by `roll`, so the batch dim is folded with the windows'
positions; every head has its own relative position bias, gathered from a table; drop path keeps or drops whole rows.
"""

import torch
import transformers
from torch import nn

SIDE, CLASSES, ROWS = 32, 12, 8


def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=SIDE,
        patch_size=2,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[3, 6],
        window_size=4,
        mlp_ratio=2.0,
        num_labels=CLASSES,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        drop_path_rate=0.3,
    )
    return transformers.SwinForImageClassification(config)


def example() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"pixel_values": torch.randn(ROWS, 3, SIDE, SIDE), "labels": torch.randint(CLASSES, (ROWS,))}

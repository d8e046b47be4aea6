"""A model file: ViT for image classification, straight from transformers, with dropout.

Interesting to cut: patches come from a convolution whose window is its stride; a class token is put before them with
`cat`, so the sequence has an odd length; heads and hidden units are cut as in a language model.
"""

import torch
import transformers
from torch import nn

SIDE, PATCH, CLASSES, ROWS = 16, 4, 12, 8


def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=48,
        intermediate_size=96,
        num_attention_heads=6,
        num_hidden_layers=3,
        num_labels=CLASSES,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return transformers.ViTForImageClassification(config)


def example() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"pixel_values": torch.randn(ROWS, 3, SIDE, SIDE), "labels": torch.randint(CLASSES, (ROWS,))}

"""Training: parallelize(), where weights come from, the emulated module, the `train` command."""

from weft.train.api import parallelize as parallelize
from weft.train.clip import clip_grad_norm_ as clip_grad_norm_

__all__ = ["clip_grad_norm_", "parallelize"]

"""Training: parallelize(), where weights come from, saving, the emulated module, the `train` command."""

from weft.train.api import parallelize as parallelize
from weft.train.checkpoint import load as load
from weft.train.checkpoint import save as save
from weft.train.clip import clip_grad_norm_ as clip_grad_norm_

__all__ = ["clip_grad_norm_", "load", "parallelize", "save"]

"""Training: parallelize(), where weights come from, the emulated module, the `train` command."""

from weft.train.door import parallelize as parallelize

__all__ = ["parallelize"]

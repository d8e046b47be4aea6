"""nn.Module and an example -> Graph: names, source lines, contexts and gradients known, no weight touched."""

from weft.capture.api import capture
from weft.capture.specialise import specialise

__all__ = ["capture", "specialise"]

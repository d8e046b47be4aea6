"""Spares: memory that is used again when nothing lies in it any more. To get new memory costs more than to fill it.

In: how long a tensor is to be. Out: a flat one with any content; it is free again when the receiver has let go of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.runtime.shared_sums import is_private


class Spares:
    """Tensors that were handed out.

    Args:
        most: bytes that are held before free ones that do not fit are let go.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: list[Tensor] = []

    def take(self, length: int, like: Tensor) -> Tensor:
        """A tensor of that many elements, of the dtype and on the device of another."""
        for one in self._held:
            if len(one) == length and one.dtype == like.dtype and is_private(one):
                return one.view(length)
        made = torch.empty(length, dtype=like.dtype, device=like.device)
        if sum(one.nbytes for one in self._held) + made.nbytes > self._most:
            self._held = [one for one in self._held if not is_private(one)]
        self._held.append(made)
        # another tensor: what is here is free when it lies alone in its memory
        return made.view(length)

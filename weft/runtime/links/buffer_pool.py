"""Buffer pool: memory that is used again when no tensor lies in it any more. New memory costs more than to fill it.

In: how long a tensor is to be. Out: a flat one with any content; it is free again when the receiver has let go of it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Tensors that were handed out.

    Args:
        most: bytes that are held before free ones that do not fit are let go.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: list[Tensor] = []

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """A tensor of that many elements."""
        for one in self._held:
            if len(one) == length and one.dtype == dtype and is_private(one):
                return one.view(length)
        made = torch.empty(length, dtype=dtype)
        if sum(one.nbytes for one in self._held) + made.nbytes > self._most:
            self._held = [one for one in self._held if not is_private(one)]
        self._held.append(made)
        # another tensor: what is here is free when it lies alone in its memory
        return made.view(length)


def is_private(tensor: Tensor) -> bool:
    """True if nothing else lies in the tensor's memory: it may be written to.

    Autograd may give two leaves gradients on one memory, and may not be done with either."""
    # one reference is the tensor's, one that of the storage asked for here
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2

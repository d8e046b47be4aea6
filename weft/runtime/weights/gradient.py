"""Gradients of leaves: each the sum of all that arrives for it.

Leaves never collect in `.grad`: torch may let the `.grad` of two leaves share memory and then adds to both in place
when it accumulates (two leaves whose views are added: 6 comes out where 4 is right). A Gradient adds in memory of its
own from the second addend on: that of the first if nothing else lies there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.runtime.layout.index import put
from weft.runtime.layout.transfer import Index
from weft.runtime.links.buffer_pool import is_private


def is_retained() -> bool:
    """True in a backward that may come again: `backward(retain_graph=True)`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


class Gradient:
    """Sums what arrives for one leaf.

    Args:
        own: what has arrived so far, in memory that may be written to.
        dtype: of the sum of several; None: as they arrive. One alone stays as it is.
    """

    def __init__(self, own: Tensor | None = None, *, dtype: torch.dtype | None = None) -> None:
        self.total, self._dtype = own, dtype
        self._private, self._given = own is not None, False

    def add(self, addend: Tensor) -> None:
        if self.total is None:
            self.total = addend
            return
        with torch.no_grad():
            if self._dtype is not None and self.total.dtype != self._dtype:
                self.total, self._private = self.total.to(self._dtype), True
            if self.is_writable():
                self.total.add_(addend)
            else:
                self.total, self._private = self.total + addend, True

    def clear(self) -> None:
        """Let go of what has come."""
        self.total, self._private, self._given = None, False, False

    def is_writable(self) -> bool:
        """True if the sum so far lies in memory of its own."""
        self._private = self._private or (self._given and self.total is not None and is_private(self.total))
        return self._private

    @torch.no_grad()
    def add_at(self, index: Index, addend: Tensor, shape: torch.Size) -> None:
        """Add to a part, without making a whole of the addend."""
        if self.total is None:
            self.total = addend.new_zeros(shape)
        elif not self._private:
            self.total = self.total.clone()
        self._private = True
        put(self.total, index, addend, add=True)

    def collect(self, leaf: Tensor) -> None:
        """Called by autograd whenever it has come to the leaf, also when no gradient came along."""
        gradient = leaf.grad
        if gradient is not None:
            # a tensor of the leaf's own; what else lies in its memory is gone when the next one comes, or is seen then
            self._given = self.total is None or self._given
            leaf.grad = None
            self.add(gradient)


def total_of(sink: Gradient, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What has arrived; zeros if nothing did."""
    if sink.total is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    assert sink.total.shape == shape, f"a gradient has shape {tuple(sink.total.shape)}, planned {tuple(shape)}"
    return sink.total if sink.total.dtype == dtype else sink.total.to(dtype)


def give_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Let a parameter have this gradient, in its own dtype unless any will do (`masters.py`)."""
    if gradient is not None and gradient.dtype != parameter.dtype and parameter.grad_dtype is not None:
        gradient = gradient.to(parameter.dtype)
    # part of a bucket, which is nobody's business: torch refuses detach_() of views
    parameter.grad = gradient.data if gradient is not None and gradient._is_view() else gradient


def make_leaf(tensor: Tensor, sink: Gradient) -> Tensor:
    """A fresh leaf on the same memory, whose gradients are summed in the sink."""
    leaf = tensor.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(sink.collect)
    return leaf

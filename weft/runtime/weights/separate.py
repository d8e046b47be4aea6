"""Gradients that lie apart: autograd may let two of them share memory."""

from __future__ import annotations

from bisect import bisect_left

from torch import Tensor


def separate(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """No two gradients on one memory (autograd may make them so): whoever scales one in place must not scale both."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for name, gradient in gradients.items():
        memory = gradient.untyped_storage()
        # tensors without content lie nowhere, each by itself
        spans, span = seen.setdefault(memory.data_ptr() or memory._cdata, []), _span(gradient)
        at = bisect_left(spans, span)
        before, after = spans[max(at - 1, 0) : at], spans[at : at + 1]
        if (before and before[0][1] > span[0]) or (after and after[0][0] < span[1]):
            gradients[name] = gradient.clone()
        elif gradient.numel():
            spans.insert(at, span)
    return gradients


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in memory; all of the memory if it does not lie there in order."""
    memory = tensor.untyped_storage()
    start, length = (
        (tensor.data_ptr(), tensor.nbytes) if tensor.is_contiguous() else (memory.data_ptr(), memory.nbytes())
    )
    return start, start + length

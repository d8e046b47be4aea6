"""MaxShapeMode: operators whose result depends on values, run on fake tensors: taken as large as they can get.

In: calls of operators on fake tensors. Out: their results; where a shape follows from values, the largest possible one:
every element of a mask counts. A number that is read out of a tensor is an error, unless one was said to stand for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class MaxShapeMode(TorchDispatchMode):
    """Goes on top of a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self._scalar: int | None = None

    @contextmanager
    def reading(self, scalar: int) -> Iterator[None]:
        """Meanwhile every number that is read out of a tensor is this one."""
        self._scalar = scalar
        try:
            yield
        finally:
            self._scalar = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        match func.overloadpacket:
            case aten.nonzero:
                return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
            case aten.masked_select:
                return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel())
            case aten.bincount:
                smallest = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
                return args[0].new_empty(max(int(smallest), 1))
            case aten._grouped_mm:
                # fake tensors know of bfloat16 alone
                return _grouped_mm(*args, **kwargs)
            case aten.index | aten.index_put | aten.index_put_:
                args = (args[0], _positions(args[1]), *args[2:])
            case aten._local_scalar_dense if self._scalar is not None:
                return float(self._scalar) if args[0].is_floating_point() else self._scalar
            case packet if str(packet).startswith("aten._fused_") and not func._schema.returns:
                # an update in place
                return None
        return func(*args, **kwargs)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        # groups divide what is contracted, or each is a matrix of its own
        shape.insert(0, a.shape[0] if a.dim() == 3 or offs is None else offs.numel())
    return a.new_empty(shape, dtype=out_dtype)


def _positions(indices: Any) -> list[Tensor | None]:
    """Indices with the positions in place of masks."""
    found: list[Tensor | None] = []
    for one in indices:
        if isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8):
            found += [one.new_empty(one.numel(), dtype=torch.int64) for _ in range(one.dim())]
        else:
            found.append(one)
    return found

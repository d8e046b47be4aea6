"""Short spellings for transfers and reshards written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.runtime.layout.reshard import Reshard
from weft.runtime.layout.transfer import Index, Transfer

F64 = torch.float64


def box(*intervals: tuple[int, int]) -> Index:
    """One interval per dim."""
    return tuple((interval,) if interval[0] < interval[1] else () for interval in intervals)


def whole(*sizes: int) -> Index:
    return box(*((0, size) for size in sizes))


def reshard(
    source: str,
    target: str,
    forward: Sequence[Transfer],
    backward: Sequence[Transfer] | None,
    shapes: tuple[Any, Any],
    dtype: torch.dtype = F64,
) -> tuple[str, Reshard]:
    """A reshard and its name, as `run_reshard` takes them."""
    back = None if backward is None else tuple(backward)
    return f"{source} -> {target}", Reshard(tuple(forward), back, *shapes, dtype)


def all_reduce(shape: tuple[int, ...], *group: int) -> Transfer:
    return Transfer("all_reduce", group, (), (), (shape,))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

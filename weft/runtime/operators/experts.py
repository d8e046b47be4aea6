"""Grouped products: rows sorted by group, each group times a matrix of its own, as experts want it.

In: the local rows, the local matrices, and where each group ends among all rows. Out: one row for each local row; rows
of groups that are elsewhere, or of none, are zeros, so the results of cells that hold different groups add up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.layout.indices import Intervals, indices

FUSED = {"cpu": (torch.float32, torch.bfloat16, torch.float16)}
"""What torch's own kernel multiplies; on devices it is certain of one dtype only."""
ALIGNMENT = 16
"""In bytes, of what that kernel reads."""


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, groups: list[int] | None) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.groups = groups
        return _rows(x, weight, ends, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, ends = ctx.saved_tensors
        to_x, to_weight, *_ = ctx.needs_input_grad
        return (
            _rows(grad, weight.transpose(-2, -1), ends, ctx.groups) if to_x else None,
            _matrices(x, grad, ends, ctx.groups) if to_weight else None,
            None,
            None,
        )


def _rows(x: Tensor, weight: Tensor, ends: Tensor, groups: list[int] | None) -> Tensor:
    """Every row times the matrix of its group; zeros in rows of groups that are not here."""
    if groups is None and _is_fused(x, weight):
        out: Tensor = torch.ops.aten._grouped_mm(x, weight, ends.int())
        # the kernel leaves rows that belong to no group as they are
        nowhere = torch.arange(len(x), device=x.device) >= ends[-1]
        return out.masked_fill(nowhere.unsqueeze(1), 0)
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for matrix, (start, stop) in zip(weight, _bounds(ends, groups), strict=True):
        if start < stop:
            out[start:stop] = x[start:stop] @ matrix
    return out


def _matrices(x: Tensor, y: Tensor, ends: Tensor, groups: list[int] | None) -> Tensor:
    """For every group the product of its rows of `x`, transposed, and of `y`."""
    if groups is None and _is_fused(x, y):
        fused: Tensor = torch.ops.aten._grouped_mm(x.transpose(0, 1), y, ends.int())
        return fused
    bounds = _bounds(ends, groups)
    out = x.new_zeros(len(bounds), x.shape[1], y.shape[1])
    for i, (start, stop) in enumerate(bounds):
        if start < stop:
            out[i] = x[start:stop].transpose(0, 1) @ y[start:stop]
    return out


def _bounds(ends: Tensor, groups: list[int] | None) -> list[tuple[int, int]]:
    """The rows of each of these groups. The run waits here until their number is known."""
    stops = ends.tolist()
    pairs = list(zip([0, *stops[:-1]], stops, strict=True))
    return pairs if groups is None else [pairs[i] for i in groups]


def _is_fused(*matrices: Tensor) -> bool:
    """Whether torch's own kernel takes these: a dtype of its own, rows or columns side by side, all aligned."""
    return all(
        one.dtype in FUSED.get(one.device.type, (torch.bfloat16,)) and one.numel() and _is_aligned(one)
        for one in matrices
    )


def _is_aligned(matrix: Tensor) -> bool:
    step, *rest = sorted(matrix.stride()[-2:])
    bytes_ = [size * matrix.itemsize for size in (*rest, *matrix.stride()[:-2])]
    return step == 1 and matrix.data_ptr() % ALIGNMENT == 0 and all(size % ALIGNMENT == 0 for size in bytes_)


def grouped_mm(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    *,
    rows: Intervals | None = None,
    groups: Intervals | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows of group i, those from `ends[i - 1]` up to `ends[i]`, times `weight[i]`.

    Args:
        x, weight: the rows and the matrices held here.
        ends: of all groups, counted in all rows.
        rows: which of all rows these are; None for all.
        groups: whose matrices these are; None for all.
        dtype: of the result; None for that of `x`.
    """
    if rows is not None:
        ends = torch.stack([ends.clamp(start, stop) - start for start, stop in rows]).sum(0) if rows else ends * 0
    held = None if groups is None else indices(groups).tolist()
    out: Tensor = _GroupedProduct.apply(x, weight, ends, held)
    return out if dtype is None else out.to(dtype)


def grouped_product(a: Tensor, b: Tensor, ends: Tensor | None = None) -> Tensor:
    """torch's `_grouped_mm` in all its forms, for any dtype and outside autograd.

    Groups divide the rows of `a` (2-d times 3-d), the columns of `b` (3-d times 2-d), or what is contracted (2-d times
    2-d); without groups it is a batch of products.
    """
    if ends is None:
        return torch.bmm(a, b)
    if a.ndim == 2 and b.ndim == 3:
        return _rows(a, b, ends, None)
    if a.ndim == 3:
        return _rows(b.transpose(0, 1), a.transpose(-2, -1), ends, None).transpose(0, 1)
    return _matrices(a.transpose(0, 1), b, ends, None)

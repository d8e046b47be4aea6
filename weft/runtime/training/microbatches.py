"""Micro-batches: the batch of a step in parts.

In: positional and keyword arguments, a number, the batch dim of each tensor. Out: as many pairs of arguments, and what
share of the rows each has. Sizes differ by one at most, larger ones first (`tensor_split`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from weft.runtime.program.calling import Arguments

BatchDim = int | None


class TooFewRows(ValueError):  # noqa: N818 - says what is wrong
    """A batch with fewer rows than micro-batches."""


def rows_of(tensors: Sequence[Tensor], dims: Sequence[BatchDim]) -> int:
    """The size of the batch."""
    sizes = {tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True) if dim is not None}
    if len(sizes) != 1:
        raise TooFewRows(f"the batch dims of the inputs have sizes {sorted(sizes)}: they are to be one")
    return int(sizes.pop())


def default_dims(tensors: Sequence[Tensor]) -> list[BatchDim]:
    """Dim 0 of every tensor that has as many rows there as the first."""
    return dims_of([tensor.shape for tensor in tensors])


def dims_of(shapes: Sequence[Sequence[int]]) -> list[BatchDim]:
    """The same for shapes."""
    rows = next((shape[0] for shape in shapes if len(shape)), None)
    return [0 if len(shape) and shape[0] == rows else None for shape in shapes]


def split(tensors: Sequence[Tensor], dims: Sequence[BatchDim], count: int) -> list[list[Tensor]]:
    """The tensors of each micro-batch."""
    rows = rows_of(tensors, dims)
    if rows < count:
        raise TooFewRows(f"a batch of {rows} rows cannot be cut into {count} micro-batches")
    parts = [
        [tensor] * count if dim is None else list(tensor.tensor_split(count, dim))
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
    return [[part[micro].contiguous() for part in parts] for micro in range(count)]


def part_sizes(rows: int, count: int) -> list[int]:
    """The rows of each micro-batch.

    >>> part_sizes(8, 3)
    [3, 3, 2]
    """
    return [rows // count + (number < rows % count) for number in range(count)]


def split_arguments(
    args: Sequence[Any], kwargs: dict[str, Any], dims: Sequence[BatchDim] | None, count: int
) -> tuple[list[Arguments], list[float]]:
    """Arguments of the forward for each micro-batch, and its share of the rows. `dims`: of the tensors, in order."""
    if count == 1:
        return [(tuple(args), kwargs)], [1.0]
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in at]
    chosen = default_dims(tensors) if dims is None else dims
    found = []
    for part in split(tensors, chosen, count):
        mine = list(leaves)
        for i, tensor in zip(at, part, strict=True):
            mine[i] = tensor
        found.append(pytree.tree_unflatten(mine, spec))
    rows = rows_of(tensors, chosen)
    return found, [part / rows for part in part_sizes(rows, count)]

"""Views that move no data: reshape in all its forms, expand, permute.

In: an op and its shapes. Out: its rule, names after the output's dims. A reshape is read as common factors of the two
shapes from outer to inner: `b s (h d) -> b s h d`. Where sizes do not nest (6 4 -> 4 6) the outermost and innermost
common divisors may still be cut, the rest may not. The local call states the cell's own shape.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.errors import RuleError
from weft.ir.graph import Op, Ref, Tensor
from weft.ops.arguments import arguments, call_with, operand, overload
from weft.ops.build import aligned, build, fixed, numbered_dims
from weft.ops.rule import Call, CellView, Dim, Dims, Product, Rule, RuleOf, dim


@dataclass(frozen=True)
class Shared:
    """A factor that both shapes have: its size and a number."""

    number: int
    size: int


Piece = Shared | int
"""A shared factor, or a size that nobody may cut."""


class _Matching:
    """Common factors of two shapes without dims of size 1, found from outer to inner."""

    def __init__(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.sizes = (tuple(source), tuple(target))
        self.pieces: tuple[list[list[Piece]], list[list[Piece]]] = ([[] for _ in source], [[] for _ in target])
        self.at = [0, 0]
        self.left = [source[0] if source else 1, target[0] if target else 1]
        self.number = 0

    def run(self) -> None:
        while self.at[0] < len(self.sizes[0]) and self.at[1] < len(self.sizes[1]):
            common = math.gcd(*self.left)
            if common not in self.left:
                self.skip_group(common)
                continue
            self.share(common)
            for side in (0, 1):
                if self.left[side] == 1:
                    self.advance(side, self.at[side] + 1)

    def share(self, size: int) -> None:
        """One more shared factor at the current position of both sides."""
        if size == 1:
            return
        for side in (0, 1):
            self.pieces[side][self.at[side]].append(Shared(self.number, size))
            self.left[side] //= size
        self.number += 1

    def advance(self, side: int, position: int) -> None:
        self.at[side] = position
        self.left[side] = self.sizes[side][position] if position < len(self.sizes[side]) else 1

    def skip_group(self, outer: int) -> None:
        """Sizes that do not nest, up to where both shapes agree again: share both ends, fix the middle."""
        ends = self.group_end()
        self.share(outer)
        inner = math.gcd(*(self.sizes[side][ends[side]] for side in (0, 1)))
        for side in (0, 1):
            for position in range(self.at[side], ends[side] + 1):
                size = self.left[side] if position == self.at[side] else self.sizes[side][position]
                size = size // inner if position == ends[side] else size
                if size > 1:
                    self.pieces[side][position].append(size)
            self.advance(side, ends[side])
            self.left[side] = inner
        self.share(inner)
        for side in (0, 1):
            self.advance(side, ends[side] + 1)

    def group_end(self) -> tuple[int, int]:
        at, extents = list(self.at), list(self.left)
        while extents[0] != extents[1]:
            side = 0 if extents[0] < extents[1] else 1
            at[side] += 1
            extents[side] *= self.sizes[side][at[side]]
        return at[0], at[1]


def common_factors(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    """Dims of both shapes in terms of their common factors, and the sizes of these.

    >>> [" ".join(map(str, dims)) for dims in common_factors((2, 12), (2, 3, 4))[:2]]
    ['d0 (d1 d2)', 'd0 d1 d2']
    >>> [" ".join(map(str, dims)) for dims in common_factors((6, 4), (4, 6))[:2]]
    ['(d0a 3) (2 d1a)', '(d0a 2) (3 d1a)']
    """
    if 0 in source or 0 in target:
        return tuple(map(fixed, source)), tuple(map(fixed, target)), {}
    kept = tuple([i for i, size in enumerate(shape) if size != 1] for shape in (source, target))
    matching = _Matching([source[i] for i in kept[0]], [target[i] for i in kept[1]])
    matching.run()
    names: dict[int, str] = {}
    sizes: dict[str, int] = {}
    for position, pieces in zip(kept[1], matching.pieces[1], strict=True):
        shared = [piece for piece in pieces if isinstance(piece, Shared)]
        for letter, piece in zip(string.ascii_lowercase, shared, strict=False):
            name = f"d{position}{letter}" if len(pieces) > 1 else f"d{position}"
            names[piece.number], sizes[name] = name, piece.size
    return _place(source, kept[0], matching.pieces[0], names), _place(target, kept[1], matching.pieces[1], names), sizes


def _place(shape: Sequence[int], kept: list[int], pieces: list[list[Piece]], names: Mapping[int, str]) -> Dims:
    dims: list[Dim] = [dim()] * len(shape)
    for position, found in zip(kept, pieces, strict=True):
        factors: Product = tuple(names[p.number] if isinstance(p, Shared) else p for p in found)
        dims[position] = dim(*factors)
    return tuple(dims)


def local_reshape(op: Op, cell: CellView) -> Call:
    """The cell's own shape. `reshape`, because a part need not have the strides that allow a view."""
    return Call("aten.reshape.default", (Ref("0"), cell.output_shape()))


def reshape_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze; a second operand only lends its shape."""
    if op.target in ("aten.view.dtype", "aten.view_copy.dtype"):
        return _reinterpret_rule(op, reads, makes)
    if len(makes) != 1:
        raise RuleError(f"{op.target} of several tensors at once has no rule", place=op.place)
    source, target, sizes = common_factors(reads[0].sizes, makes[0].sizes)
    inputs = [source, *(target for _ in reads[1:])]
    return build(inputs, [target], reads, makes, sizes=sizes, linear=[[0]], local=local_reshape, source="view")


def _reinterpret_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """The same bytes as another dtype: the last dim may change its size."""
    same = reads[0].sizes == makes[0].sizes
    dims = numbered_dims(makes[0].sizes)
    source = dims if same else (*dims[:-1], fixed(reads[0].sizes[-1]))
    target = dims if same else (*dims[:-1], fixed(makes[0].sizes[-1]))
    return build([source], [target], reads, makes, source="view")


def expand_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """expand, expand_as, broadcast_to: new or stretched dims may be cut too, each cell makes its own."""
    shape = makes[0].sizes
    dims = numbered_dims(shape)
    source = aligned(dims, shape, reads[0].sizes)
    assert source is not None, f"{reads[0]} expands to {shape}"
    return build(
        [source, *(dims for _ in reads[1:])], [dims], reads, makes, linear=[[0]], local=_local_expand, source="view"
    )


def _local_expand(op: Op, cell: CellView) -> Call:
    return Call("aten.expand.default", (Ref("0"), cell.output_shape()))


def broadcast_tensors_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Each output is one input, expanded to the common shape."""
    shape = makes[0].sizes
    dims = numbered_dims(shape)
    inputs = [aligned(dims, shape, tensor.sizes) or () for tensor in reads]
    return build(inputs, [dims] * len(makes), reads, makes, linear=[range(len(reads))], source="view")


def permute_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """permute, transpose, t, movedim: the order of dims is asked of torch, on a tensor that holds nothing."""
    num_dims = len(reads[0].sizes)
    operator = overload(op.target)
    assert operator is not None
    values = arguments(op)
    probe = torch.empty(tuple(range(2, 2 + num_dims)), device="meta")
    moved = operator(*(probe if operand(value) == 0 else value for value in values.values()))
    order = [size - 2 for size in moved.shape]
    target = numbered_dims(makes[0].sizes)
    source = [dim()] * num_dims
    for position, origin in enumerate(order):
        source[origin] = target[position]
    return build([tuple(source)], [target], reads, makes, linear=[[0]], source="view")


def unfold_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Sliding windows along one dim, which nobody may cut; the window is a new last dim."""
    values = arguments(op)
    num_dims = len(reads[0].sizes)
    at = int(values["dimension"]) % max(num_dims, 1)
    dims = list(numbered_dims(makes[0].sizes[:-1]))
    window = fixed(makes[0].sizes[-1])
    if num_dims == 0:
        return build([()], [(window,)], reads, makes, linear=[[0]], source="view")
    source = [*dims]
    source[at], dims[at] = fixed(reads[0].sizes[at]), fixed(makes[0].sizes[at])
    return build([tuple(source)], [(*dims, window)], reads, makes, linear=[[0]], source="view")


def diagonal_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """The two dims of the diagonal may not be cut, the others may. The diagonal is the new last dim."""
    values = arguments(op)
    num_dims = len(reads[0].sizes)
    names = ("dim1", "dim2")
    pair = {int(values[name]) % num_dims for name in names}
    target = (*numbered_dims(makes[0].sizes[:-1]), fixed(makes[0].sizes[-1]))
    kept = iter(target)
    source = tuple(fixed(reads[0].sizes[i]) if i in pair else next(kept) for i in range(num_dims))
    return build([source], [target], reads, makes, linear=[[0]], source="view")


def whole_view_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """as_strided: strides and offsets speak of the whole tensor, so nothing may be cut."""
    sides = [tuple(map(fixed, tensor.sizes)) for tensor in (*reads, *makes)]
    return build(sides[: len(reads)], sides[len(reads) :], reads, makes, linear=[[0]], source="view")


def local_like(op: Op, cell: CellView) -> Call:
    """The op's own call with `size` set to the cell's output shape."""
    return call_with(op, {"size": cell.output_shape()})


_RESHAPES = "view _unsafe_view view_copy _reshape_alias reshape reshape_as view_as flatten unflatten ravel squeeze"
_SQUEEZES = "squeeze_copy unsqueeze unsqueeze_copy atleast_1d atleast_2d atleast_3d"
_PERMUTES = "permute permute_copy transpose transpose_copy t t_copy numpy_T mT movedim moveaxis swapaxes swapdims"

VIEWS: Mapping[str, RuleOf] = {
    **{f"aten.{name}": reshape_rule for name in (*_RESHAPES.split(), *_SQUEEZES.split())},
    **{f"aten.{name}": permute_rule for name in _PERMUTES.split()},
    **dict.fromkeys(("aten.adjoint", "aten.mH", "aten.matrix_H"), permute_rule),
    **dict.fromkeys(("aten.expand", "aten.expand_as", "aten.expand_copy", "aten.broadcast_to"), expand_rule),
    "aten.broadcast_tensors": broadcast_tensors_rule,
    **dict.fromkeys(("aten.unfold", "aten.unfold_copy"), unfold_rule),
    **dict.fromkeys(("aten.diagonal", "aten.diagonal_copy", "aten.linalg_diagonal"), diagonal_rule),
    **dict.fromkeys(("aten.as_strided", "aten.as_strided_copy"), whole_view_rule),
}
"""Computed rules, by family."""

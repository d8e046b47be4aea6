"""Views that move no data: reshape in all its forms, expand, permute, diagonals.

In: an op and its shapes. Out: its rule, names after the output's dims. A reshape is read as common factors of the two
shapes from outer to inner: `b s (h d) -> b s h d`. Where sizes do not nest (6 4 -> 4 6) the outermost and innermost
common divisors may still be cut, the rest may not. The local call states the cell's own shape.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.ir.graph import Ref
from weft.ops.arguments import call, operand, overload, positive
from weft.ops.build import OpView, RuleOf, broadcasting, fixed_dims, numbered_dims, rules_of
from weft.ops.rule import Dim, Dims, Local, Product, Rule, dim, fixed


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


def _shaped(target: str) -> Local:
    """The call that gives a cell's part its own shape."""
    return lambda op, cell: call(target, Ref("0"), cell.output_shape())


def reshape_rule(it: OpView) -> Rule:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze; a second operand only lends its shape."""
    if it.op.target in ("aten.view.dtype", "aten.view_copy.dtype"):
        # the same bytes as another dtype: the last dim may change its size
        return it.beside(() if it.shape == it.result else (len(it.shape) - 1,), source="view")
    if len(it.makes) != 1:
        raise it.error(f"{it.op.target} of several tensors at once has no rule")
    source, target, sizes = common_factors(it.shape, it.result)
    inputs = [source, *(target for _ in it.reads[1:])]
    # `reshape`, because a part need not have the strides that allow a view
    local = _shaped("aten.reshape.default")
    return it.rule(inputs, [target], sizes=sizes, linear=[[0]], local=local, source="view")


def expand_rule(it: OpView) -> Rule:
    """expand, expand_as, broadcast_to: new or stretched dims may be cut too, each cell makes its own."""
    dims = numbered_dims(it.result)
    inputs = [*broadcasting(dims, it.result, it.reads[:1]), *(dims for _ in it.reads[1:])]
    return it.rule(inputs, [dims], linear=[[0]], local=_shaped("aten.expand.default"), source="view")


def broadcast_tensors_rule(it: OpView) -> Rule:
    """Each output is one input, expanded to the common shape."""
    dims = numbered_dims(it.result)
    inputs = broadcasting(dims, it.result, it.reads)
    return it.rule(inputs, [dims] * len(inputs), linear=[range(len(inputs))], source="view")


def order_of(permute: Callable[[torch.Tensor], torch.Tensor], num_dims: int) -> list[int]:
    """From which dim each dim of a permuted tensor comes."""
    probe = torch.empty(tuple(range(2, 2 + num_dims)), device="meta")
    return [int(size) - 2 for size in permute(probe).shape]


def permute_rule(it: OpView) -> Rule:
    """permute, transpose, t, movedim: the order of dims is asked of torch, on a tensor that holds nothing."""
    num_dims = len(it.shape)
    operator = overload(it.op.target)
    assert operator is not None
    order = order_of(
        lambda probe: operator(*(probe if operand(value) == 0 else value for value in it.args.values())), num_dims
    )
    target = numbered_dims(it.result)
    source = [dim()] * num_dims
    for one, came_from in zip(target, order, strict=True):
        source[came_from] = one
    return it.rule([tuple(source)], [target], linear=[[0]], source="view")


def unfold_rule(it: OpView) -> Rule:
    """Sliding windows along one dim, which nobody may cut; the window is a new last dim."""
    whole = (positive(it.args["dimension"], len(it.shape)),)
    *sizes, window = it.result
    target = (*numbered_dims(sizes, whole=whole), fixed(window))
    return it.rule([numbered_dims(it.shape, whole=whole)], [target], linear=[[0]], source="view")


def diagonal_rule(it: OpView) -> Rule:
    """The two dims of the diagonal may not be cut, the others may. The diagonal is the new last dim."""
    flat = (*numbered_dims(it.result[:-1]), fixed(it.result[-1]))
    return it.rule([_around(it, flat, it.shape)], [flat], linear=[[0]], source="view")


def diag_embed_rule(it: OpView) -> Rule:
    """The last dim becomes the diagonal of two new ones."""
    flat = (*numbered_dims(it.shape[:-1]), fixed(it.shape[-1]))
    return it.rule([flat], [_around(it, flat, it.result)], linear=[[0]])


def diagonal_scatter_rule(it: OpView) -> Rule:
    """Written to one diagonal, the last dim of what is written."""
    *sizes, last = it.shapes[1]
    flat = (*numbered_dims(sizes), fixed(last))
    target = _around(it, flat, it.result)
    return it.rule([target, flat], [target], linear=[[0, 1]])


def _around(it: OpView, flat: Dims, sizes: Sequence[int]) -> Dims:
    """The dims beside a diagonal, with the two of the diagonal put in their places."""
    pair = {positive(it.args[name], len(sizes)) for name in ("dim1", "dim2")}
    rest = iter(flat)
    return tuple(fixed(size) if i in pair else next(rest) for i, size in enumerate(sizes))


def _whole(source: str) -> RuleOf:
    """Strides and offsets (as_strided), one diagonal (diag, trace) or blocks that share no dim speak of the whole:
    nothing may be cut."""
    return lambda it: it.rule(
        fixed_dims(*it.reads), fixed_dims(*it.makes), linear=[range(len(it.reads))], source=source
    )


RESHAPES = """
view _unsafe_view view_copy _reshape_alias reshape reshape_as view_as flatten unflatten ravel squeeze squeeze_copy
unsqueeze unsqueeze_copy atleast_1d atleast_2d atleast_3d
"""
_PERMUTES = """
permute permute_copy transpose transpose_copy t t_copy numpy_T mT movedim moveaxis swapaxes swapdims adjoint mH matrix_H
"""

RULES: Mapping[str, RuleOf] = {
    **rules_of(reshape_rule, RESHAPES),
    **rules_of(permute_rule, _PERMUTES),
    **rules_of(expand_rule, "expand expand_as expand_copy broadcast_to"),
    "aten.broadcast_tensors": broadcast_tensors_rule,
    **rules_of(unfold_rule, "unfold unfold_copy"),
    **rules_of(diagonal_rule, "diagonal diagonal_copy linalg_diagonal"),
    "aten.diag_embed": diag_embed_rule,
    "aten.diagonal_scatter": diagonal_scatter_rule,
    **rules_of(_whole("view"), "as_strided as_strided_copy"),
    **rules_of(_whole("table"), "diag diagflat trace block_diag cartesian_prod"),
}
"""Rules by operator."""

"""Moves in words: a change of layout as calls along named axes.

In: the Program's moves. Out: runtime Moves that do the same, or None where no words fit. Whatever is proposed is
compared with the true transfers before it is printed: on every rank, or, on large grids, at the ends and in the middle
of every axis. (Where ranges are named, the whole table of ranges is compared in any case.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from weft.codegen.spread import Spread, Spreads
from weft.ir import program as ir
from weft.ir.layout import Layout
from weft.ir.ranges import count, select
from weft.lower.transfer import Transfers
from weft.runtime.layout import moves as rt
from weft.runtime.layout.cuts import Cut, whole
from weft.runtime.layout.transfer import Transfer

FEW = 64
"""Up to so many ranks all are compared."""


class MoveWords:
    """Says moves in words, each once."""

    def __init__(self, spreads: Spreads, transfers: Transfers) -> None:
        self._spreads, self.transfers = spreads, transfers
        self._one = cache(self._say)

    def all(self, moves: Iterable[ir.Move], start: Layout | None) -> tuple[rt.Move, ...] | None:
        """Moves one after the other; None if one of them does not follow the axes, or is not about what is there.

        Args:
            start: of the tensor that is moved, if it is known.
        """
        out: list[rt.Move] = []
        for move in moves:
            found = self._one(move)
            if found is None or (start is not None and not _same_shapes(start, move.source)):
                return None
            out.extend(found)
            start = move.target
        return tuple(out)

    def _say(self, move: ir.Move) -> tuple[rt.Move, ...] | None:
        source, target = self._spreads.of(move.source), self._spreads.of(move.target)
        if source is None or target is None:
            return None
        for option in self._options(move, source, target):
            if all(self._same(option, move, rank) for rank in self._ranks()):
                return option
        return None

    def _options(self, move: ir.Move, source: Spread, target: Spread) -> Iterator[tuple[rt.Move, ...]]:
        lost = tuple(axis for axis in source.partial if axis not in target.partial)
        gained = tuple(axis for axis in target.partial if axis not in source.partial)
        less, more = _changes(source, target)
        if lost and not gained and not less and not more:
            yield (rt.all_reduce(lost),)
        if not lost and not less:
            slices = [rt.slice_to(dim, self._cut(move.target, dim, source, target)) for dim in more]
            yield (*slices, *([rt.first(gained)] if gained else []))
        if not lost and not gained and len(less) == 1 and not more:
            (dim,) = less
            cut = self._cut(move.source, dim, target, source)
            yield (rt.all_gather(dim, cut, of=_uneven(move.source, dim)),)
        if lost and not gained and not less and list(more.values()) == [lost]:
            (dim,) = more
            yield (rt.reduce_scatter(dim, self._cut(move.target, dim, source, target)),)
        if not lost and not gained and len(less) == 1 and list(less.values()) == list(more.values()):
            (joined,), (dim,) = less, more
            cut, by = self._cut(move.target, dim, source, target), self._cut(move.source, joined, target, source)
            plain = None if by == Cut(_short(less[joined])) else by
            yield (rt.all_to_all(dim, cut, joined=joined, by=plain, of=_uneven(move.source, joined)),)

    def _cut(self, layout: Layout, dim: int, before: Spread, after: Spread) -> Cut:
        """How the axes that `after` has more than `before` cut the dim."""
        axes = tuple(axis for axis in after.dims[dim] if axis not in before.dims[dim])
        table = layout.ranges[dim]
        if not before.dims[dim] and table is not None:
            found = self._spreads.describe(table, layout.shape[dim], axes)
            if found is not None:
                return found
        return Cut(_short(axes))

    def _ranks(self) -> Iterable[int]:
        if self._spreads.devices <= FEW:
            return range(self._spreads.devices)
        choices = [sorted({0, 1, size // 2, size - 1}) for _, size in self._spreads.grid]
        return [self._spreads.places[0].rank_at(found) for found in itertools.product(*choices)]

    def _same(self, option: Sequence[rt.Move], move: ir.Move, rank: int) -> bool:
        """True if the words mean the move's own transfer for this rank."""
        truth = self.transfers.of(move, rank)
        place = self._spreads.places[rank]
        shape = move.source.parts_on(rank)[0].shape
        if truth is None:
            return False
        if len(option) == 1:
            return same_transfer(option[0].transfer(shape, place), truth)
        if truth.kind != "local":
            return False
        index, empty = whole(shape), False
        for one in option:
            made = one.transfer(shape, place)
            empty = empty or not made.sends
            if made.sends:
                index = tuple(select(a, b) for a, b in zip(index, made.sends[0].index, strict=True))
            shape = made.shapes[0]
        if (shape,) != truth.shapes or empty:
            return (shape,) == truth.shapes and not truth.sends
        sent = [(piece.slot, piece.index) for piece in truth.sends]
        return sent == [(0, index)] and [piece.index for piece in truth.receives] == [whole(shape)]


def _same_shapes(a: Layout, b: Layout) -> bool:
    """True if local tensors have the same shapes: what words mean depends on them."""
    if a == b:
        return True
    devices = a.grid.cells_on.keys() | b.grid.cells_on.keys()
    return all([p.shape for p in a.parts_on(d)] == [p.shape for p in b.parts_on(d)] for d in devices)


def _uneven(layout: Layout, dim: int) -> int | None:
    """The size of a dim whose parts are not all equal; it cannot be told from one of them."""
    table = layout.ranges[dim]
    return None if table is None or len(set(map(count, table))) == 1 else layout.shape[dim]


def _changes(source: Spread, target: Spread) -> tuple[dict[int, tuple[str, ...]], dict[int, tuple[str, ...]]]:
    """The axes that each dim loses, and those that it gains."""
    less, more = {}, {}
    for dim, (before, after) in enumerate(zip(source.dims, target.dims, strict=True)):
        gone = tuple(axis for axis in before if axis not in after)
        new = tuple(axis for axis in after if axis not in before)
        less.update({dim: gone} if gone else {})
        more.update({dim: new} if new else {})
    return less, more


def same_transfer(ours: Transfer, truth: Transfer) -> bool:
    """True if both do the same to the tensors. How it is carried may differ."""
    if (ours.kind == "all_reduce") != (truth.kind == "all_reduce") or (ours.kind == "local") != (truth.kind == "local"):
        return False
    if ours.kind == "all_reduce":
        return ours.group == truth.group and ours.shapes == truth.shapes
    adds = ours.add == truth.add or len(truth.receives) <= 1
    return (
        adds
        and sorted(ours.group) == sorted(truth.group)
        and (ours.sends, ours.receives, ours.shapes) == (truth.sends, truth.receives, truth.shapes)
    )


def _short(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes

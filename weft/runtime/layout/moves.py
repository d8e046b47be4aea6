"""Moves: changes of layout said in terms of the axes of the grid, and what each means for one rank.

    all_reduce(axes)              addends along the axes become their sum
    all_gather(dim, axes)         parts of a dim become the whole dim
    reduce_scatter(dim, axes)     addends become parts of the sum
    all_to_all(cut, joined, axes) a dim is cut along the axes, another one joined
    slice_to(dim, axes)           the rank's own part of a dim: nothing travels
    first(axes)                   the value becomes addends: itself in the first place, zeros elsewhere

In: a move, the shape of the local tensor, the rank's place. Out: the Transfer that carries it. `of` is the size of a
joined dim where its parts are not all equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.runtime.layout.cuts import Axes, Cut, Intervals, Place, as_axes, as_cut, whole
from weft.runtime.layout.transfer import Index, Piece, Transfer

Shape = tuple[int, ...]


UNCUT = Cut(())


@dataclass(frozen=True)
class Move:
    """One change of layout along axes of the grid."""

    kind: str
    axes: tuple[str, ...]
    cut_dim: int = -1
    cut: Cut = UNCUT
    joined_dim: int = -1
    joined: Cut = UNCUT
    of: int | None = None

    def transfer(self, shape: Shape, place: Place) -> Transfer:
        """What a rank with a local tensor of that shape does."""
        match self.kind:
            case "all_reduce":
                group = place.group(self.axes)
                return Transfer("all_reduce", group, (), (), (shape,)) if len(group) > 1 else _kept(shape, place)
            case "first":
                return _kept(shape, place) if place.at(self.axes) == 0 else _zeros(shape, place)
            case "slice":
                index = _replaced(whole(shape), self.cut_dim, self.cut.ranges(shape[self.cut_dim], place))
                return _local(index, place)
            case _:
                return self._collective(shape, place)

    def _collective(self, shape: Shape, place: Place) -> Transfer:
        group = place.group(self.axes)
        target = self._target(shape, place)
        sends, receives = [], []
        for peer in sorted(group):
            there = place.of(peer)
            taken = whole(shape)
            if self.cut_dim >= 0:
                taken = _replaced(taken, self.cut_dim, self.cut.ranges(shape[self.cut_dim], there))
            if _size(taken):
                sends.append(Piece(peer, 0, taken))
        for peer in group:
            put = whole(target)
            if self.joined_dim >= 0:
                put = _replaced(put, self.joined_dim, self.joined.ranges(target[self.joined_dim], place.of(peer)))
            if _size(put):
                receives.append(Piece(peer, 0, put))
        kind = self.kind if len(group) > 1 else "local"
        return Transfer(kind, group, tuple(sends), tuple(receives), (target,), self.kind == "reduce_scatter")

    def _target(self, shape: Shape, place: Place) -> Shape:
        target = list(shape)
        if self.cut_dim >= 0:
            target[self.cut_dim] = _length(self.cut.ranges(shape[self.cut_dim], place))
        if self.joined_dim >= 0:
            even = shape[self.joined_dim] * place.count(self.axes)
            target[self.joined_dim] = even if self.of is None else self.of
        return tuple(target)


def chain(moves: Sequence[Move], shape: Shape, place: Place) -> tuple[tuple[Transfer, ...], Shape]:
    """The transfers of moves one after the other, and the shape of what comes out."""
    found = []
    for move in moves:
        found.append(move.transfer(shape, place))
        shape = found[-1].shapes[0]
    return tuple(found), shape


def all_reduce(axes: Axes) -> Move:
    """Addends along the axes become their sum, on every rank."""
    return Move("all_reduce", as_axes(axes))


def all_gather(dim: int, axes: Axes | Cut, *, of: int | None = None) -> Move:
    """Parts of a dim become the whole dim, on every rank."""
    cut = as_cut(axes)
    return Move("all_gather", as_axes(cut.axes), joined_dim=dim, joined=cut, of=of)


def reduce_scatter(dim: int, axes: Axes | Cut) -> Move:
    """Addends become parts of their sum, cut along a dim."""
    cut = as_cut(axes)
    return Move("reduce_scatter", as_axes(cut.axes), cut_dim=dim, cut=cut)


def all_to_all(dim: int, axes: Axes | Cut, *, joined: int, by: Cut | None = None, of: int | None = None) -> Move:
    """Parts of the dim `joined` become parts of another. `by`: how the joined dim was cut, if not plainly."""
    cut = as_cut(axes)
    names = as_axes(cut.axes)
    return Move("all_to_all", names, cut_dim=dim, cut=cut, joined_dim=joined, joined=by or Cut(names), of=of)


def slice_to(dim: int, axes: Axes | Cut) -> Move:
    """The rank's own part of a dim that it holds whole."""
    cut = as_cut(axes)
    return Move("slice", as_axes(cut.axes), cut_dim=dim, cut=cut)


def first(axes: Axes) -> Move:
    """The value becomes addends along the axes: itself in the first place, zeros elsewhere."""
    return Move("first", as_axes(axes))


def _kept(shape: Shape, place: Place) -> Transfer:
    return _local(whole(shape), place)


def _zeros(shape: Shape, place: Place) -> Transfer:
    return Transfer("local", (place.rank,), (), (), (shape,))


def _local(index: Index, place: Place) -> Transfer:
    target = tuple(map(_length, index))
    if not _size(index):
        return _zeros(target, place)
    sent, received = Piece(place.rank, 0, index), Piece(place.rank, 0, whole(target))
    return Transfer("local", (place.rank,), (sent,), (received,), (target,))


def _replaced(index: Index, dim: int, ranges: Intervals) -> Index:
    return (*index[:dim], ranges, *index[dim + 1 :])


def _length(ranges: Intervals) -> int:
    return sum(stop - start for start, stop in ranges)


def _size(index: Index) -> int:
    size = 1
    for ranges in index:
        size *= _length(ranges)
    return size

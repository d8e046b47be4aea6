"""Moves: changes of layout said in terms of the axes of the grid, and what each means for one rank.

    all_reduce(axes)              addends along the axes become their sum
    all_gather(dim, axes)         parts of a dim become the whole dim
    reduce_scatter(dim, axes)     addends become parts of the sum
    all_to_all(cut, joined, axes) a dim is cut along the axes, another one joined
    slice_to(dim, axes)           the rank's own part of a dim: nothing travels
    first(axes)                   the value becomes addends: itself in the first place, zeros elsewhere

Programs make their moves anew in every step: equal ones are one object.

In: a move, the shape of the local tensor, the rank's place. Out: the Transfer that carries it. `of` is the size of a
joined dim where its parts are not all equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from weft.runtime.layout.cuts import Axes, Cut, Place, as_axes, as_cut, axes_text, whole
from weft.runtime.layout.index import size
from weft.runtime.layout.indices import Intervals, extent
from weft.runtime.layout.transfer import Index, Piece, Transfer

Shape = tuple[int, ...]


UNCUT = Cut(())
TRAVELS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Kinds that take several ranks."""


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

    def __hash__(self) -> int:
        # programs look for what they know of their moves in every step
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.axes, self.cut_dim, self.cut, self.joined_dim, self.joined, self.of))

    def __str__(self) -> str:
        """The call that makes it, as it is written in a program.

        >>> print(all_to_all(1, "tp", joined=2), all_reduce("dp"))
        all_to_all(1, "tp", joined=2) all_reduce("dp")
        """
        cuts, joins = self.cut_dim >= 0, self.joined_dim >= 0
        words = [str(self.cut_dim), str(self.cut)] if cuts else [str(self.joined_dim), str(self.joined)]
        words = words if cuts or joins else [axes_text(self.axes)]
        words += [f"joined={self.joined_dim}"] if cuts and joins else []
        words += [f"by={self.joined}"] if cuts and joins and self.joined != Cut(self.axes) else []
        words += [f"of={self.of}"] if self.of is not None else []
        return f"{self.kind}({', '.join(words)})"

    def transfer(self, shape: Shape, place: Place) -> Transfer:
        """What a rank with a local tensor of that shape does."""
        group = place.group(self.axes) if self.kind in TRAVELS else (place.rank,)
        if self.kind == "all_reduce" and len(group) > 1:
            return Transfer("all_reduce", group, (), (), (shape,))
        if self.kind == "first" and place.at(self.axes):
            return Transfer("local", group, (), (), (shape,))
        target = self._target(shape, place)
        sends, receives = [], []
        for peer in sorted(group):
            there = place.of(peer)
            taken = whole(shape)
            if self.cut_dim >= 0:
                taken = _replaced(taken, self.cut_dim, self.cut.ranges(shape[self.cut_dim], there))
            if all(taken):
                sends.append(Piece(peer, 0, taken))
        for peer in group:
            put = whole(target)
            if self.joined_dim >= 0:
                put = _replaced(put, self.joined_dim, self.joined.ranges(target[self.joined_dim], place.of(peer)))
            if all(put):
                receives.append(Piece(peer, 0, put))
        kind = self.kind if len(group) > 1 else "local"
        even = kind == "all_gather" and [size(piece.index) for piece in receives] == [shape] * len(group)
        return Transfer(kind, group, tuple(sends), tuple(receives), (target,), self.kind == "reduce_scatter", even)

    def _target(self, shape: Shape, place: Place) -> Shape:
        target = list(shape)
        if self.cut_dim >= 0:
            target[self.cut_dim] = extent(self.cut.ranges(shape[self.cut_dim], place))
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


@cache
def all_reduce(axes: Axes) -> Move:
    """Addends along the axes become their sum, on every rank."""
    return Move("all_reduce", as_axes(axes))


@cache
def all_gather(dim: int, axes: Axes | Cut, *, of: int | None = None) -> Move:
    """Parts of a dim become the whole dim, on every rank."""
    cut = as_cut(axes)
    return Move("all_gather", as_axes(cut.axes), joined_dim=dim, joined=cut, of=of)


@cache
def reduce_scatter(dim: int, axes: Axes | Cut) -> Move:
    """Addends become parts of their sum, cut along a dim."""
    cut = as_cut(axes)
    return Move("reduce_scatter", as_axes(cut.axes), cut_dim=dim, cut=cut)


@cache
def all_to_all(dim: int, axes: Axes | Cut, *, joined: int, by: Axes | Cut | None = None, of: int | None = None) -> Move:
    """Parts of the dim `joined` become parts of another. `by`: how the joined dim was cut, if not plainly."""
    cut = as_cut(axes)
    names = as_axes(cut.axes)
    return Move("all_to_all", names, cut_dim=dim, cut=cut, joined_dim=joined, joined=as_cut(by or names), of=of)


@cache
def slice_to(dim: int, axes: Axes | Cut) -> Move:
    """The rank's own part of a dim that it holds whole."""
    cut = as_cut(axes)
    return Move("slice_to", as_axes(cut.axes), cut_dim=dim, cut=cut)


@cache
def first(axes: Axes) -> Move:
    """The value becomes addends along the axes: itself in the first place, zeros elsewhere."""
    return Move("first", as_axes(axes))


MOVES = tuple(one.__name__ for one in (all_reduce, all_gather, reduce_scatter, all_to_all, slice_to, first))
"""What programs call. A Move's kind is the name of the function that makes it."""


def _replaced(index: Index, dim: int, ranges: Intervals) -> Index:
    return (*index[:dim], ranges, *index[dim + 1 :])

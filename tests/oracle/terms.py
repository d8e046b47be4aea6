"""Content: what a local tensor holds, known without running anything.

    Content := tensor, the indices at its local positions, Term ...
    Term    := base, a box in the space of what was summed away, a box of the tensor's indices

A local tensor is the sum of its terms: `base` says which addend (of which operand, of which use), the first box which
part of the sum over names that the tensor no longer has, the second on which indices (zero elsewhere). It is *complete*
if for every base of the tensor the terms cover both boxes exactly once. Moves are linear, so they only cut, join
and count terms: nothing is lost or counted twice unseen.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from weft.ir.ranges import Box, Ranges, apart, ascending, common, count, select, tidy, volume

Index = tuple[Ranges, ...]


@dataclass(frozen=True)
class Term:
    """An addend, on some indices."""

    base: Hashable
    summed: tuple[tuple[str, Ranges], ...]
    box: Box


@dataclass(frozen=True)
class Content:
    """What one local tensor holds. `dims`: the global index at each local position, dim by dim."""

    tensor: str
    dims: Box
    terms: tuple[Term, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(count, self.dims))


@dataclass(frozen=True)
class Universe:
    """All bases of a tensor's sum, each with the space that was summed away for it (name -> all indices)."""

    bases: Mapping[Hashable, tuple[tuple[str, Ranges], ...]]


WHOLE = Universe({"": ()})
"""Of a tensor that nobody added up."""


def full(tensor: str, dims: Box, base: Hashable = "", summed: tuple[tuple[str, Ranges], ...] = ()) -> Content:
    """A local tensor with one term on all of its indices."""
    return Content(tensor, tuple(map(tidy, dims)), (Term(base, summed, ascending(dims)),))


def zeros(tensor: str, dims: Box) -> Content:
    """A local tensor of zeros."""
    return Content(tensor, tuple(map(tidy, dims)), ())


def added(parts: Sequence[Content]) -> Content:
    """The sum of local tensors that hold the same indices."""
    return Content(parts[0].tensor, parts[0].dims, tuple(term for part in parts for term in part.terms))


def taken(content: Content, index: Index) -> Content:
    """The local positions `index` cut out."""
    dims = tuple(select(ranges, positions) for ranges, positions in zip(content.dims, index, strict=True))
    kept = ascending(dims)
    if kept == ascending(content.dims):
        return Content(content.tensor, dims, content.terms)
    terms = (
        Term(t.base, t.summed, tuple(common(a, b) for a, b in zip(t.box, kept, strict=True))) for t in content.terms
    )
    return Content(content.tensor, dims, tuple(term for term in terms if volume(term.box)))


def placed(tensor: str, target: Box, pieces: Sequence[tuple[Index, Content]], add: bool) -> Content | str:
    """A local tensor with declared indices `target`, zero at first, with pieces put (or added) at local positions.

    Returns the reason if the pieces do not fit together.
    """
    pieces = [(index, piece) for index, piece in pieces if volume(index)]
    if not pieces:
        return zeros(tensor, target)
    wrong = [piece.tensor for _, piece in pieces if piece.tensor != tensor]
    if wrong:
        return f"a piece of {wrong[0]} arrives where {tensor} is put together"
    if not add and not apart([ascending(index) for index, _ in pieces]):
        return f"two pieces of {tensor} are put in one place"
    dims = []
    for dim in range(len(target)):
        found = _along(target[dim], [(index[dim], piece.dims[dim]) for index, piece in pieces])
        if found is None:
            return f"pieces of {tensor} disagree on which indices of dim {dim} they hold"
        dims.append(found)
    return Content(tensor, tuple(dims), tuple(term for _, piece in pieces for term in piece.terms))


def _along(declared: Ranges, pieces: Sequence[tuple[Ranges, Ranges]]) -> Ranges | None:
    """The indices along one dim after pieces (positions, their indices) are in place; None if they contradict."""
    size = count(declared)
    known: dict[tuple[int, int], Ranges] = {}
    for positions, indices in dict.fromkeys(pieces):
        at = 0
        for start, stop in positions:
            held = select(indices, ((at, at + stop - start),))
            at += stop - start
            if known.setdefault((start, stop), held) != held:
                return None
    out: list[tuple[int, int]] = []
    reached = 0
    for (start, stop), held in sorted(known.items()):
        if start < reached:
            return _along_fine(declared, pieces)
        out.extend(select(declared, ((reached, start),)) if start > reached else ())
        out.extend(held)
        reached = stop
    if reached > size:
        return None
    out.extend(select(declared, ((reached, size),)) if reached < size else ())
    return tidy(out)


def _along_fine(declared: Ranges, pieces: Sequence[tuple[Ranges, Ranges]]) -> Ranges | None:
    """The same, index by index, where pieces overlap in part."""
    found: dict[int, int] = {}
    for positions, indices in pieces:
        places = [p for start, stop in positions for p in range(start, stop)]
        held = [i for start, stop in indices for i in range(start, stop)]
        for place, index in zip(places, held, strict=True):
            if found.setdefault(place, index) != index:
                return None
    default = [i for start, stop in declared for i in range(start, stop)]
    return tidy((found.get(p, default[p]), found.get(p, default[p]) + 1) for p in range(len(default)))


def incomplete(content: Content, universe: Universe) -> str:
    """What is missing from the sum, or counted twice; empty if it is complete."""
    target = ascending(content.dims)
    if not volume(target):
        return ""
    by_base: dict[Hashable, list[Term]] = {base: [] for base in universe.bases}
    for term in content.terms:
        if term.base not in by_base:
            return f"it holds a stray addend {show_base(term.base)}"
        by_base[term.base].append(term)
    for base, terms in by_base.items():
        space = universe.bases[base]
        if len(terms) == 1 and terms[0].box == target and terms[0].summed == space:
            continue
        names = tuple(name for name, _ in space)
        boxes = [(*(dict(term.summed)[name] for name in names), *term.box) for term in terms]
        boxes = [box for box in boxes if volume(box)]
        total = volume((*(ranges for _, ranges in space), *target))
        covered = sum(map(volume, boxes))
        if covered > total or not apart(boxes):
            return f"addend {show_base(base)} is counted more than once"
        if covered < total:
            return f"addend {show_base(base)} is missing in part ({covered} of {total} elements)"
    return ""


def show_base(base: Hashable) -> str:
    """A base in words."""
    match base:
        case "":
            return "(its value)"
        case ("in", operand, inner):
            return f"of operand {operand}" + (f" {show_base(inner)}" if inner else "")
        case ("use", op, operand, *_):
            return f"from {op} operand {operand}"
        case _:
            return str(base)

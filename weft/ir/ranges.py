"""Range lists: which indices of one dim a part holds, and in which order they are stored.

    Ranges := ((start, stop), ...)      disjoint, stored concatenated in the listed order
    Box    := a range list for each dim

A fused query-key-value weight cut by heads holds three ranges per part; a zigzag sequence two. Everything here
is pure arithmetic on tuples: no tensors, no layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Ranges = tuple[tuple[int, int], ...]
Box = tuple[Ranges, ...]
"""A range list for each dim."""


class Segment(NamedTuple):
    """`length` indices found at `source` in one concatenated range list and at `target` in another."""

    source: int
    target: int
    length: int


def whole(size: int) -> Ranges:
    """All indices of a dim of that size."""
    return ((0, size),) if size else ()


def count(ranges: Ranges) -> int:
    """Number of indices.

    >>> count(((0, 2), (6, 9)))
    5
    """
    return sum(stop - start for start, stop in ranges)


def tidy(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Drop empty ranges and join neighbours, keeping the order.

    >>> tidy([(0, 2), (2, 2), (2, 5), (7, 8)])
    ((0, 5), (7, 8))
    """
    out: list[tuple[int, int]] = []
    for start, stop in pairs:
        if start >= stop:
            continue
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


def overlap(source: Ranges, target: Ranges) -> tuple[Segment, ...]:
    """Where the common indices lie in each list, in the order of `target`.

    >>> overlap(((0, 4), (8, 12)), ((2, 10),))
    (Segment(source=2, target=0, length=2), Segment(source=4, target=6, length=2))
    """
    segments: list[Segment] = []
    target_at = 0
    for t_start, t_stop in target:
        found: list[tuple[int, int, int]] = []
        source_at = 0
        for s_start, s_stop in source:
            lo, hi = max(s_start, t_start), min(s_stop, t_stop)
            if lo < hi:
                found.append((lo, source_at + lo - s_start, hi - lo))
            source_at += s_stop - s_start
        for lo, at, length in sorted(found):
            _append(segments, Segment(at, target_at + lo - t_start, length))
        target_at += t_stop - t_start
    return tuple(segments)


def _append(segments: list[Segment], new: Segment) -> None:
    if segments:
        last = segments[-1]
        if last.source + last.length == new.source and last.target + last.length == new.target:
            segments[-1] = Segment(last.source, last.target, last.length + new.length)
            return
    segments.append(new)


def common(a: Ranges, b: Ranges) -> Ranges:
    """The indices in both, in the order of `b`.

    >>> common(((0, 4), (8, 12)), ((2, 10),))
    ((2, 4), (8, 10))
    """
    pairs: list[tuple[int, int]] = []
    for b_start, b_stop in b:
        hits = ((max(s, b_start), min(e, b_stop)) for s, e in a)
        pairs.extend(sorted(pair for pair in hits if pair[0] < pair[1]))
    return tidy(pairs)


def union(lists: Iterable[Ranges]) -> Ranges:
    """All indices of several disjoint lists, ascending.

    >>> union([((4, 6),), ((0, 2), (6, 8))])
    ((0, 2), (4, 8))
    """
    return tidy(sorted(pair for ranges in lists for pair in ranges))


def disjoint(lists: Sequence[Ranges]) -> bool:
    """True if no index occurs twice."""
    pairs = sorted(pair for ranges in lists for pair in ranges if pair[0] < pair[1])
    return all(left[1] <= right[0] for left, right in itertools.pairwise(pairs))


def select(ranges: Ranges, positions: Ranges) -> Ranges:
    """The indices stored at `positions` of the concatenated list.

    >>> select(((0, 4), (8, 12)), ((2, 6),))
    ((2, 4), (8, 10))
    """
    pairs: list[tuple[int, int]] = []
    for p_start, p_stop in positions:
        at = 0
        for start, stop in ranges:
            lo, hi = max(p_start, at), min(p_stop, at + stop - start)
            if lo < hi:
                pairs.append((start + lo - at, start + hi - at))
            at += stop - start
    return tidy(pairs)


def product(outer: Ranges, size: int, inner: Ranges) -> Ranges:
    """Indices of a merged dim `(outer inner)` where `inner` has `size` indices in all.

    >>> product(((0, 2),), 4, ((1, 3),))
    ((1, 3), (5, 7))
    >>> product(((1, 3),), 4, ((0, 4),))
    ((4, 12),)
    """
    if inner == whole(size):
        return tidy((start * size, stop * size) for start, stop in outer)
    return tidy(
        (index * size + start, index * size + stop)
        for o_start, o_stop in outer
        for index in range(o_start, o_stop)
        for start, stop in inner
    )


def shift(ranges: Ranges, offset: int) -> Ranges:
    """The same ranges, `offset` further on."""
    return tuple((start + offset, stop + offset) for start, stop in ranges)


def ascending(box: Iterable[Ranges]) -> Box:
    """A box as a set: order within each dim does not matter."""
    return tuple(tidy(sorted(ranges)) for ranges in box)


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod(map(count, box))


def apart(boxes: Sequence[Box]) -> bool:
    """True if no two boxes share an element.

    Along a dim whose ranges are either equal or apart, boxes of different ranges are apart: only those of equal ranges
    are compared further. Parts of a grid are of that kind, which spares comparing every pair."""
    if len(boxes) < 2:
        return True
    for dim in range(len(boxes[0])):
        groups: dict[Ranges, list[Box]] = {}
        for box in boxes:
            groups.setdefault(box[dim], []).append(box)
        if len(groups) > 1 and disjoint(list(groups)):
            return all(apart(group) for group in groups.values())
    return all(not _touch(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])


def _touch(a: Box, b: Box) -> bool:
    return all(common(x, y) for x, y in zip(a, b, strict=True))


def text(ranges: Ranges) -> str:
    """As printed: `0:4,8:12`; `-` if empty."""
    return ",".join(f"{start}:{stop}" for start, stop in ranges) or "-"

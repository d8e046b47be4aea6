"""Takes and gives as typed steps: what enters a loop over chunks part by part, and what leaves it put together.

In: the values on both sides. Out: nothing, or an UndecidedError. The value outside lies as the *merged* layout of the
one inside (`ir/merge.py`): splits joined, addends summed, copies once. Along the axes on which cells share a device:

    taken     split: each cell cuts out its own range;  copy: each reads all;  partial: the first gets all, others zeros
    backward  split: ranges join;  copy with addends as gradient: they sum;  partial with copies: the first's goes back
    given     split: ranges join;  partial: addends sum.  Backward: each cell gets its range, or all
"""

from __future__ import annotations

from collections.abc import Callable

from weft.ir.layout import COPY, PARTIAL, Layout
from weft.ir.merge import Merge, merge
from weft.ir.program import Value
from weft.ir.ranges import select, tidy
from weft.lower.script import positions
from weft.lower.typed_moves import require


class ChunkTypes:
    """Takes and gives, each pair of values judged once."""

    def __init__(self, same: Callable[[Layout, Layout], bool]) -> None:
        self._same = same
        self._found: set[tuple[Layout, Layout]] = set()

    def take(self, source: Value, target: Value, back: bool) -> bool:
        """The target is cut out of the source. True if it has addends, zero but for one, that the source has not."""
        merged = self._merged(target, source, back)
        for axis in merged.shrunk if back else ():
            assert target.grad is not None
            require(_pairs(target, axis) in ((COPY, PARTIAL), (PARTIAL, COPY)) or _is_split(target, axis), "copies")
        self._cut_out(source.layout, target.layout)
        return bool(merged.shrunk & set(target.layout.partial_axes))

    def give(self, source: Value, target: Value, back: bool) -> None:
        """The target is put together from the source."""
        merged = self._merged(source, target, back)
        adds = merged.shrunk & set(source.layout.partial_axes)
        for axis in merged.shrunk:
            role = source.layout.roles[axis]
            require(role == PARTIAL if adds else role.kind == "split", "splits and addends at once, or copies")
            if back and adds:
                require(_pairs(source, axis) == (PARTIAL, COPY), "addends of an addend")
        self._cut_out(target.layout, source.layout)

    def _merged(self, inner: Value, outer: Value, back: bool) -> Merge:
        merged = merge(inner.layout.grid)
        require(merged is not None and not outer.layout.grid.repeats, "no chunks")
        assert merged is not None
        require(self._same(merged.layout(inner.layout), outer.layout), "a loop's value lies otherwise outside")
        if back:
            assert inner.grad is not None
            assert outer.grad is not None
            require(self._same(merged.layout(inner.grad), outer.grad), "a gradient lies otherwise outside")
        return merged

    def _cut_out(self, whole: Layout, parts: Layout) -> None:
        """Every part is found in the whole that its device holds, index by index."""
        if (whole, parts) in self._found:
            return
        for part in parts.parts():
            held = whole.parts_on(part.device)
            require(len(held) == 1, "a device holds the value several times, or not")
            for ranges, at, mine in zip(held[0].ranges, positions(held[0], part), part.ranges, strict=True):
                require(tidy(select(ranges, at)) == tidy(mine), "a part is not in the whole")
        self._found.add((whole, parts))


def _pairs(value: Value, axis: int) -> tuple[object, object]:
    assert value.grad is not None
    return value.layout.roles[axis], value.grad.roles[axis]


def _is_split(value: Value, axis: int) -> bool:
    return value.layout.roles[axis].kind == "split"
